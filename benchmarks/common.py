"""What the benchmarks share: worker processes, interleaving, tables, results.

Every figure is the smallest of several medians. Each median comes from a fresh process
that runs one implementation. Rounds are interleaved, so that neither other processes
nor the order of the runs favours one implementation. What is counted, not timed,
may run beside other processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zygote
from torch.testing._internal.distributed.fake_pg import FakeStore
from tqdm import tqdm

from fsdp_c._text import positive_int
from fsdp_c.tools.bench._command import machine
from fsdp_c.tools.bench._processes import end_rank
from fsdp_c.tools.bench._report import smallest

Json = dict[str, Any]

WORKER_TIMEOUT_S = 300.0
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
TIMED_HEADERS = ["median", "spread"]  # after the one that names the figure
LOSS_TOLERANCE = 1e-3  # all that communicate must have trained the same model
COUNTED_AT_ONCE = 2  # processes whose instructions or bytes are counted


def make_parser(
    description: str | None,
    *,
    steps: int | None = None,
    warmup: int | None = None,
    rounds: int | None = None,
) -> argparse.ArgumentParser:
    """Return a parser of the options that benchmarks and their workers have."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    add = parser.add_argument
    for name, default, what in (
        ("--steps", steps, "timed steps per process"),
        ("--warmup", warmup, "steps before them"),
        ("--rounds", rounds, "processes per figure"),
    ):
        if default is not None:
            add(name, type=positive_int, default=default, help=what)
    add("--json", type=Path, help="write the results to this file")
    add("--markdown", action="store_true", help="print the tables as markdown")
    add("--worker", help=argparse.SUPPRESS)
    add("--worker-folder", type=Path, help=argparse.SUPPRESS)
    return parser


def run_benchmark(
    args: argparse.Namespace,
    *,
    worker: Callable[[argparse.Namespace], None],
    measure: Callable[[argparse.Namespace], Json],
    show: Callable[[Json, argparse.Namespace], str],
) -> int:
    """Run one worker; or the benchmark, and print and write its results."""
    if args.worker is not None:
        worker(args)
        return 0
    data = measure(args)
    print(environment_line(data["environment"]))
    print(show(data, args))
    for notice in data.get("notices", ()):
        print(notice, file=sys.stderr)
    if args.json is not None:
        write_json(args.json, data)
    return 0


def results_of(name: str, args: argparse.Namespace, **results: Any) -> Json:
    """Return the results of a benchmark with what they depend on."""
    return {
        "benchmark": name,
        "command": command_line(),
        "environment": machine("cpu"),
        "settings": {
            name: vars(args)[name]
            for name in ("steps", "warmup", "rounds")
            if name in args
        },
        **results,
    }


def command_line() -> str:
    """Return the command that started this process, less where its results go."""
    script, *words = sys.argv
    for option in ("--json", "--save-json", "--out"):
        if option in words:
            where = words.index(option)
            del words[where : where + 2]
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *words])


def environment_line(env: Json) -> str:
    """Return the environment as one line of text."""
    return (
        f"torch {env['torch']}, Python {env['python']}, {env['cpu']}, "
        f"{env['cores']} cores, {env['date']}"
    )


def median_ms(step: Callable[[], object], *, num_steps: int, num_warmup: int) -> float:
    """Return the median time of ``step`` in milliseconds."""
    for _ in range(num_warmup):
        step()
    times = []
    for _ in range(num_steps):
        begin = time.perf_counter_ns()
        step()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e6


# Workers -------------------------------------------------------------------------


def report_result(args: argparse.Namespace, result: Json) -> None:
    """Hand rank 0's result to the process that started this one."""
    if os.environ["RANK"] == "0":
        (args.worker_folder / "result.json").write_text(json.dumps(result))


def join_fake_group(world_size: int) -> None:
    """Be rank 0 of a group whose other ranks do not exist: collectives are copies."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


@contextlib.contextmanager
def joined_group(args: argparse.Namespace, backend: str = "gloo") -> Iterator[None]:
    """Use one thread, and the group of all ranks of this worker, which ends with it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        (args.worker_folder / "store").as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    yield
    dist.barrier()
    end_rank()


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Return the mean of the ranks' losses."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def check_losses(where: str, losses: Mapping[str, float]) -> None:
    """Check that the implementations ended with the same loss.

    Raises:
        RuntimeError: They did not: one trained wrongly.
    """
    spread = max(losses.values(), default=0.0) - min(losses.values(), default=0.0)
    if not spread <= LOSS_TOLERANCE or not math.isfinite(spread):
        raise RuntimeError(f"{where}: losses after the same steps differ: {losses}")


@contextlib.contextmanager
def starting_workers(
    num_at_once: int, environ: Mapping[str, str] | None = None
) -> Iterator[Callable[[Sequence[str], int], Json]]:
    """Have what runs one implementation in fresh processes, on several threads.

    It takes the script with its arguments (``--worker-folder`` is added) and the number
    of ranks, and returns rank 0's result. It raises RuntimeError if a rank failed; the
    message ends with its output. A run that takes too long is made once more.

    Args:
        num_at_once: Runs at the same time.
        environ: More environment variables of the processes.
    """
    with zygote.started({**QUIET, **(environ or {})}, num_at_once) as free:

        def run(words: Sequence[str], num_ranks: int) -> Json:
            one = free.get()
            words = [*words, "--worker-folder"]
            try:
                return one.run(words, num_ranks, timeout_s=WORKER_TIMEOUT_S)
            except TimeoutError as error:
                print(f"{error}\nIt runs once more.", file=sys.stderr)
                return one.run(words, num_ranks, timeout_s=WORKER_TIMEOUT_S)
            finally:
                free.put(one)

        yield run


def run_interleaved(
    jobs: Mapping[str, Sequence[str]],
    *,
    num_rounds: int,
    num_ranks: int,
    environ: Mapping[str, str] | None = None,
    num_at_once: int = 1,
    rounds_of: Callable[[str], int] | None = None,
    run: Callable[[str], Json] | None = None,
) -> dict[str, list[Json]]:
    """Run every job once per round, in alternating order.

    Args:
        jobs: Command line of each job, by name.
        num_rounds: Times that each job runs.
        num_ranks: Processes per job.
        environ: More environment variables of theirs.
        num_at_once: Jobs that run at the same time: 1, if they are timed.
        rounds_of: Fewer rounds of a job, by its name.
        run: What runs a job and returns its result, instead of forks.

    Returns:
        The results of each job, one per round.
    """
    order = [
        name
        for index in range(num_rounds)
        for name in list(jobs)[:: 1 if index % 2 == 0 else -1]
        if rounds_of is None or index < rounds_of(name)
    ]
    results: dict[str, list[Json]] = {name: [] for name in jobs}
    with contextlib.ExitStack() as stack:
        if run is None:
            fork = stack.enter_context(starting_workers(num_at_once, environ))

            def run(name: str) -> Json:
                return fork(jobs[name], num_ranks)

        bar = stack.enter_context(tqdm(total=len(order), unit="run", leave=False))
        pool = stack.enter_context(ThreadPoolExecutor(num_at_once))
        for name, result in zip(order, pool.map(run, order), strict=True):
            results[name].append(result)
            bar.set_postfix_str(name)
            bar.update()
    return results


def timed_row(runs: Sequence[Json], key: str = "step_ms") -> Json:
    """Return the smallest of the rounds' medians, and all of them."""
    return {key: smallest(runs, key), f"all_{key}": [run[key] for run in runs]}


def spread(row: Json, key: str = "step_ms") -> float:
    """Return the largest minus the smallest median of a row, over the smallest."""
    medians = row[f"all_{key}"]
    return float(max(medians) / min(medians) - 1.0)


def timed_cells(row: Json, digits: int, key: str = "step_ms") -> list[str]:
    """Return smallest, median and spread of the rounds, for `TIMED_HEADERS`."""
    return [
        f"{row[key]:.{digits}f}",
        f"{statistics.median(row[f'all_{key}']):.{digits}f}",
        f"{spread(row, key):.0%}",
    ]


# Tables --------------------------------------------------------------------------


def ratio(value: float, reference: float | None) -> str:
    """Return ``value / reference`` for a table, a dash where it would mean nothing."""
    if reference is None or min(value, reference) <= 0.0:
        return "-"
    return f"{value / reference:.2f}x"


def format_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool
) -> str:
    """Lay a table out; the first column is text, the others are numbers."""
    widths = [
        max(len(row[column]) for row in (headers, *rows))
        for column in range(len(headers))
    ]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [
            cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)
        ]
        return f"| {' | '.join(padded)} |" if markdown else "  ".join(padded)

    if markdown:
        rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    else:
        rule = ["-" * width for width in widths]
    return "\n".join([line(headers), line(rule), *(line(row) for row in rows)])


def write_json(path: Path, data: Json) -> None:
    """Write ``data``, creating the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n")
