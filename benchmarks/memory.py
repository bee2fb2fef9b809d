"""Peak bytes of tensor memory per rank, measured exactly.

    python benchmarks/memory.py

Full fine-tuning, also with the optimizer in backward, LoRA inside the units,
accumulation, activation checkpointing and bf16, of one transformer with AdamW on 2 and
4 ranks: fsdp_c over gloo (FSDP_C_TRANSPORT=c10d) and over shared memory, whose rings
count, its fully_shard over gloo, and torch's FSDP1 and FSDP2 over gloo.
memory_trace.py counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import memory_worker
import torch
from common import (
    COUNTED_AT_ONCE,
    Json,
    check_losses,
    format_table,
    make_parser,
    results_of,
    run_benchmark,
    starting_workers,
)
from implementations import FSDP1_ORIG, FSDP2, FSDP_C, FSDP_C_FULLY, FSDP_C_ORIG, LABELS
from memory_trace import build_counter
from memory_worker import (
    ACCUMULATE,
    BF16,
    FULL,
    HSDP,
    IN_BACKWARD,
    LORA,
    RECOMPUTE,
    SHARDED,
    UNSHARDED,
)
from tqdm import tqdm

from fsdp_c._text import positive_int
from fsdp_c.tools.bench._workload import Block

MIB = 2**20
GOAL = 0.95  # of torch's smallest peak

TITLES = {
    FULL: "Full fine-tuning",
    LORA: "LoRA of rank {lora_rank}, adapters and frozen weights in one unit",
    ACCUMULATE: "Accumulation over {micro_batches} micro-batches",
    HSDP: "Accumulation over {micro_batches} micro-batches, HYBRID_SHARD on 2 x 2",
    RECOMPUTE: "Activation checkpointing of every block",
    BF16: "bf16 mixed precision, reduction in fp32",
}
ABOVE = """\
Over gloo a unit that runs needs its whole parameters at once. Where the goal is between
the peak and the peak without a block, only units that run with a part of their
parameters would meet it. `no_sync()` with HYBRID_SHARD keeps whole gradients, as
FSDP1's; torch's smallest row there keeps sharded ones."""
GLOO = "gloo"
SHM = "shm"


@dataclass(frozen=True)
class Job:
    """One row: what is trained how, on how many ranks."""

    scenario: str
    num_ranks: int
    implementation: str
    transport: str
    accumulation: str
    label: str


def _jobs() -> list[Job]:
    """Return all rows. Those of torch come after those of fsdp_c."""
    jobs = []

    def add(scenario: str, num_ranks: int, way: str, native: str, *torchs: Any) -> None:
        for transport, where in ((GLOO, "gloo"), (SHM, "shared memory")):
            label = f"fsdp_c{native}, {where}"
            row = (scenario, num_ranks, FSDP_C_ORIG, transport, way, label)
            jobs.append(Job(*row))
        for name, suffix in torchs:
            short = LABELS[name]
            label = (short if name in FSDP_C else short.partition(",")[0]) + suffix
            jobs.append(Job(scenario, num_ranks, name, GLOO, way, label))

    both = ((FSDP_C_FULLY, ", gloo"), (FSDP1_ORIG, ""), (FSDP2, ""))
    unsharded = (
        (FSDP1_ORIG, ", no_sync()"),
        (FSDP2, ", set_requires_gradient_sync(False)"),
    )
    for num_ranks in (2, 4):
        add(FULL, num_ranks, UNSHARDED, "", *both)
        add(FULL, num_ranks, IN_BACKWARD, ", optimizer_in_backward")
    add(LORA, 2, UNSHARDED, "", *both)
    add(LORA, 4, UNSHARDED, "", *both)
    for scenario, num_ranks in ((ACCUMULATE, 2), (ACCUMULATE, 4), (HSDP, 4)):
        add(scenario, num_ranks, UNSHARDED, ", no_sync()", *unsharded)
        # Without replicas FSDP2 has no sharded sum: it reduces each micro-batch.
        sharded = (FSDP2, ", set_requires_all_reduce(False)")
        others = (sharded,) if scenario == HSDP else ()
        add(scenario, num_ranks, SHARDED, ", no_sync(sharded=True)", *others)
    for scenario in (RECOMPUTE, BF16):
        add(scenario, 2, UNSHARDED, "", *both)
        add(scenario, 4, UNSHARDED, "", *both)
    return jobs


DEFAULTS = {
    "layers": 8,
    "dim": 256,
    "heads": 4,
    "lora_rank": 8,
    "batch": 4,
    "time": 64,
    "micro_batches": 2,
}


def _measured(result: Json) -> Json:
    """Return the peaks of one worker's result in bytes.

    What the one-byte step has at its peak is split by kind; what a batch adds to
    that peak are activations.
    """

    def highest(name: str) -> Json:
        phases = [
            phase
            for key, phase in result["phases"].items()
            if key.startswith(f"{name}: ")
        ]
        peak: Json = max(phases, key=lambda phase: phase["peak"])
        return peak

    small = highest(memory_worker.ONE_BYTE)
    kinds = small["by_kind"]
    total = highest(memory_worker.BATCH)["peak"]
    rings = result.get("memory_stats", {}).get("ring_nbytes", 0)
    return {
        "parameters": kinds["parameters"],
        "gradients": kinds.get("gradients", 0),
        "optimizer": kinds["optimizer state"],
        "unsharded": kinds["rest"],
        "without_activations": small["peak"],
        "activations": total - small["peak"],
        "rings": rings,
        "total": total + rings,
        "between_steps": result["phases"][f"{memory_worker.ONE_BYTE}: begin"][
            "at_begin"
        ],
    }


def _run_job(
    job: Job, settings: Json, run: Callable[[Sequence[str], int], Json]
) -> tuple[Json, str | None]:
    """Return the row of one job, and why it could not be measured, if so."""
    row: Json = asdict(job)
    arguments = [__file__, "--worker", job.implementation, "--scenario", job.scenario]
    arguments += ["--accumulation", job.accumulation, "--transport", job.transport]
    for option, value in settings.items():
        arguments += [f"--{option.replace('_', '-')}", str(value)]
    try:
        result = run(arguments, job.num_ranks)
    except RuntimeError as error:
        last_line = str(error).strip().splitlines()[-1]
        return row, last_line.partition("]: ")[2] or last_line
    row["measured"] = _measured(result)
    row |= {"loss": result["loss"], "details": result}
    return row, None


def _group(row: Json) -> str:
    """Return the table of a row: all in it trained the same model."""
    return f"{row['scenario']}-{row['num_ranks']}"


def measure(args: argparse.Namespace) -> Json:
    """Run all implementations and return the results.

    Raises:
        RuntimeError: The implementations' losses differ: one trained wrongly.
    """
    settings = {name: vars(args)[name] for name in DEFAULTS}
    jobs = [
        job
        for job in _jobs()
        if job.scenario in (args.only or TITLES)
        and job.num_ranks in (args.only_ranks or [2, 4])
    ]
    rows: list[Json] = []
    notices: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fsdp_c-benchmark-") as folder:
        environ = {"LD_PRELOAD": str(build_counter(Path(folder)))}
        with (
            starting_workers(COUNTED_AT_ONCE, environ) as run,
            ThreadPoolExecutor(COUNTED_AT_ONCE) as pool,
        ):
            runs = pool.map(lambda job: _run_job(job, settings, run), jobs)
            found = list(tqdm(runs, total=len(jobs), unit="run", leave=False))
        for job, (row, reason) in zip(jobs, found, strict=True):
            rows.append(row)
            if reason is not None:
                notices.append(f"{job.label} ({_group(row)}): {reason}")
    for group in dict.fromkeys(_group(row) for row in rows):
        its_rows = [row for row in rows if _group(row) == group and "loss" in row]
        check_losses(group, {row["label"]: row["loss"] for row in its_rows})
    data = results_of("memory", args, notices=notices, results=rows)
    data["settings"] = settings
    return data


def describe(data: Json) -> str:
    """Return the model and its inputs in words."""
    settings = data["settings"]
    return (
        f"{settings['layers']} blocks, width {settings['dim']}, fp32, AdamW "
        f"(fused), {settings['batch']} x {settings['time']} bytes per rank and backward"
    )


def title(data: Json, group: str) -> str:
    """Return the heading of one table."""
    scenario, _, num_ranks = group.partition("-")
    return f"{TITLES[scenario].format(**data['settings'])}, {num_ranks} ranks"


def _smallest_of_torch(data: Json, group: str) -> int | None:
    """Return the smallest peak of torch's rows in a table, if there is one."""
    return min(
        (
            row["measured"]["total"]
            for row in data["results"]
            if _group(row) == group
            and row["implementation"] not in FSDP_C
            and "measured" in row
        ),
        default=None,
    )


def block_nbytes(data: Json) -> int:
    """Return the bytes of a block's whole parameters."""
    settings = data["settings"]
    with torch.device("meta"):
        block = Block(settings["dim"], settings["heads"])
    return sum(param.nbytes for param in block.parameters())


def render_above_goal(data: Json, *, markdown: bool) -> str:
    """Return the rows of fsdp_c above GOAL, with and without a block's parameters."""
    block = block_nbytes(data)
    cells = []
    for row in data["results"]:
        smallest = _smallest_of_torch(data, _group(row))
        if row["implementation"] not in FSDP_C or "measured" not in row:
            continue
        total = row["measured"]["total"]
        if smallest is None or round(total / smallest, 3) <= GOAL:
            continue
        name = f"{title(data, _group(row))}: {row['label']}"
        sizes = (total, GOAL * smallest, total - block)
        cells.append([name, *(f"{size / MIB:.1f}" for size in sizes)])
    headers = ["MiB per rank", "peak", f"goal: {GOAL} of torch's smallest"]
    return format_table([*headers, "without a block"], cells, markdown=markdown)


def render(data: Json, group: str, *, markdown: bool) -> str:
    """Return the results of one table, in MiB.

    The last column is the peak over the smallest of torch's in the table.
    """
    rows = [row for row in data["results"] if _group(row) == group]
    smallest = _smallest_of_torch(data, group)
    columns = (
        "parameters",
        "gradients",
        "optimizer",
        "unsharded",
        "activations",
        "rings",
        "total",
    )
    cells = []
    for row in rows:
        found = row.get("measured")
        line = [row["label"]]
        line += ["-" if not found else f"{found[key] / MIB:.1f}" for key in columns]
        is_ours = row["implementation"] in FSDP_C and found and smallest
        line.append(f"{found['total'] / smallest:.3f}" if is_ours else "-")
        cells.append(line)
    headers = ["MiB per rank", *columns[:-1], "peak", "to torch's smallest"]
    return format_table(headers, cells, markdown=markdown)


def render_all(data: Json, *, heading: str, markdown: bool) -> str:
    """Return the tables by scenario and ranks, each below its heading."""
    tables = [
        f"{heading}{title(data, group)}\n\n{render(data, group, markdown=markdown)}"
        for group in dict.fromkeys(_group(row) for row in data["results"])
    ]
    above = render_above_goal(data, markdown=markdown)
    tables.append(f"{heading}Above {GOAL} of torch's smallest\n\n{ABOVE}\n\n{above}")
    return "\n\n".join(tables)


def show(data: Json, args: argparse.Namespace) -> str:
    """Return all tables, and what they are about."""
    tables = render_all(data, heading="", markdown=args.markdown)
    return f"{describe(data)}\n\n{tables}"


def parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    add = parser.add_argument
    for name, default in DEFAULTS.items():
        add(f"--{name.replace('_', '-')}", type=positive_int, default=default)
    add("--only", nargs="+", choices=list(TITLES), help="scenarios")
    add("--only-ranks", nargs="+", type=int, choices=(2, 4))
    for hidden in ("--scenario", "--accumulation", "--transport"):
        add(hidden, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    args = parser().parse_args()
    if args.dim % args.heads != 0:
        sys.exit(f"error: --dim {args.dim} is no multiple of --heads {args.heads}")
    worker = memory_worker.run
    sys.exit(run_benchmark(args, worker=worker, measure=measure, show=show))
