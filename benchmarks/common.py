"""What the benchmarks share: worker processes, interleaving, tables, environment.

Every figure is the smallest of several medians. Each median comes from a fresh process
that runs one implementation. Rounds are interleaved, so that neither other processes
nor the order of the runs favours one implementation.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

Json = dict[str, Any]

WORKER_TIMEOUT_S = 300.0


def positive_int(text: str) -> int:
    """Parse a command-line integer that must be at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def add_common_arguments(
    parser: argparse.ArgumentParser, *, steps: int, warmup: int, rounds: int
) -> None:
    """Add the options that every benchmark has, and the hidden ones of a worker."""
    parser.add_argument(
        "--steps", type=positive_int, default=steps, help="timed steps per process"
    )
    parser.add_argument("--warmup", type=positive_int, default=warmup)
    parser.add_argument(
        "--rounds", type=positive_int, default=rounds, help="processes per figure"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument(
        "--markdown", action="store_true", help="print the table as markdown"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--worker-folder", type=Path, help=argparse.SUPPRESS)


def environment() -> Json:
    """Return what the figures depend on: machine, versions, date."""
    cpu = platform.processor() or "unknown CPU"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.date.today().isoformat(),
    }


def command_line() -> str:
    """Return the command that started this process."""
    script, *arguments = sys.argv
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *arguments])


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


def report_result(folder: Path, result: Json) -> None:
    """Hand a worker's result to the process that started it (rank 0 calls this)."""
    (folder / "result.json").write_text(json.dumps(result))


def run_workers(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    environ: Mapping[str, str] | None = None,
    prefix: Callable[[int], Sequence[str]] = lambda _: (),
) -> Json:
    """Run one implementation in fresh processes and return rank 0's result.

    Args:
        arguments: Command line after the interpreter; ``--worker-folder`` is added.
        num_ranks: Processes to start, each with RANK and WORLD_SIZE set.
        environ: More environment variables of theirs.
        prefix: The words before a rank's command, which it must end up as.

    Raises:
        RuntimeError: A rank failed or timed out; the message ends with its output.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp_c-benchmark-") as name:
        folder = Path(name)
        command = [sys.executable, *arguments, "--worker-folder", str(folder)]
        processes: list[subprocess.Popen[bytes]] = []
        logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
        try:
            for rank, log in enumerate(logs):
                env = {
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(num_ranks),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONWARNINGS": "ignore",
                    **(environ or {}),
                }
                with log.open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            [*prefix(rank), *command],
                            env=env,
                            stdout=output,
                            stderr=output,
                        )
                    )
            failed = _wait_for_all(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if failed is not None:
            output_tail = logs[failed].read_text(errors="replace")[-4000:]
            raise RuntimeError(
                f"rank {failed} of {' '.join(arguments)} ended with "
                f"{processes[failed].returncode}:\n{output_tail}"
            )
        result: Json = json.loads((folder / "result.json").read_text())
        return result


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all have ended well; return the first to fail or to be late."""
    deadline = time.monotonic() + WORKER_TIMEOUT_S
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return rank
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return codes.index(None)
        time.sleep(0.05)


def run_interleaved(
    jobs: Mapping[str, Sequence[str]], *, num_rounds: int, num_ranks: int
) -> dict[str, list[Json]]:
    """Run every job once per round, in alternating order.

    Args:
        jobs: Command line of each job, by name.
        num_rounds: Times that each job runs.
        num_ranks: Processes per job.

    Returns:
        The results of each job, one per round.
    """
    results: dict[str, list[Json]] = {name: [] for name in jobs}
    with tqdm(total=num_rounds * len(jobs), unit="run", leave=False) as bar:
        for round_index in range(num_rounds):
            order = list(jobs)[:: 1 if round_index % 2 == 0 else -1]
            for name in order:
                bar.set_postfix_str(name)
                results[name].append(run_workers(jobs[name], num_ranks=num_ranks))
                bar.update()
    return results


def smallest(results: Sequence[Json], key: str) -> float:
    """Return the smallest ``key`` over the rounds."""
    return min(float(result[key]) for result in results)


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
