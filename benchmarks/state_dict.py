"""Time and memory of state dicts and checkpoints, on 2 ranks of one host.

    python benchmarks/state_dict.py

For GPTs with AdamW: full state dicts of model and optimizer on rank 0, sharded ones,
both loaded again, and a checkpoint of model and optimizer, written to disk and read
back. torch's FSDP1 and FSDP2 use torch.distributed.checkpoint. Plain writes and reads
of as many bytes show the disk, plain copies the memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import state_dict_worker
from common import (
    TIMED_HEADERS,
    Json,
    format_table,
    make_parser,
    ratio,
    results_of,
    run_benchmark,
    run_interleaved,
    timed_cells,
    timed_row,
)
from implementations import (
    FSDP1_FLAT,
    FSDP1_ORIG,
    FSDP2,
    FSDP_C_FLAT,
    FSDP_C_FULLY,
    FSDP_C_ORIG,
    LABELS,
)
from memory_trace import build_counter
from state_dict_worker import DISK, LOAD, MEMCPY, NUM_RANKS, OPERATIONS, SAVE, WIDTHS

IMPLEMENTATIONS = [
    FSDP_C_ORIG,
    FSDP_C_FLAT,
    FSDP_C_FULLY,
    FSDP1_ORIG,
    FSDP1_FLAT,
    FSDP2,
    DISK,
    MEMCPY,
]
NAMES = {
    **LABELS,
    DISK: "plain writes and reads",
    MEMCPY: "a copy of as many bytes into fresh memory",
}
# What a row of an operation is divided by.
OWN = {
    FSDP1_ORIG: FSDP_C_ORIG,
    FSDP1_FLAT: FSDP_C_FLAT,
    FSDP2: FSDP_C_FULLY,
    DISK: FSDP_C_ORIG,
    MEMCPY: FSDP_C_ORIG,
}
MIB = 2**20
LARGE = "200M"  # an operation takes seconds
LEFT_OUT = ((LARGE, FSDP_C_FLAT), (LARGE, FSDP1_FLAT))


def num_steps(args: argparse.Namespace, size: str) -> int:
    """Return how many times an operation is timed in a process."""
    return -(-args.steps // 3) if size == LARGE else int(args.steps)


def measure(args: argparse.Namespace) -> Json:
    """Run all implementations and return the results."""
    with tempfile.TemporaryDirectory(
        prefix="fsdp_c-benchmark-", dir=args.folder
    ) as folder:
        jobs = {
            f"{size} {name}": [
                *(__file__, "--worker", name, "--size", size),
                *("--steps", str(num_steps(args, size)), "--folder", folder),
            ]
            for name in args.only or IMPLEMENTATIONS
            for size in ([args.size] if args.size else WIDTHS)
            if args.only or args.size or (size, name) not in LEFT_OUT
        }
        results = run_interleaved(
            jobs,
            num_rounds=args.rounds,
            num_ranks=NUM_RANKS,
            environ={"LD_PRELOAD": str(build_counter(Path(folder)))},
        )
    rows = []
    for job, rounds in results.items():
        size, _, name = job.partition(" ")
        for operation in rounds[0]["operations"]:
            runs = [each["operations"][operation] for each in rounds]
            rows.append(
                {
                    "size": size,
                    "implementation": name,
                    "operation": operation,
                    "extra": max(run["extra"] for run in runs),
                    **timed_row(runs, "seconds"),
                }
            )
    return results_of("state_dict", args, results=rows)


def describe(size: str) -> str:
    """Return a model and the bytes of its checkpoint in words."""
    numel = state_dict_worker.num_params(size)
    return (
        f"{numel / 1e6:.1f} M parameters, {3 * 4 * numel / 2**30:.2f} GiB with "
        "AdamW's state"
    )


def render(data: Json, size: str, *, markdown: bool) -> str:
    """Return the times of one size as a table."""
    rows = [row for row in data["results"] if row["size"] == size]
    seconds = {
        (row["operation"], row["implementation"]): row["seconds"] for row in rows
    }
    cells = []
    for operation in OPERATIONS:
        for row in rows:
            if row["operation"] != operation:
                continue
            name = row["implementation"]
            label = NAMES[name]
            if operation in (SAVE, LOAD) and name in (FSDP1_ORIG, FSDP2):
                label += ", torch.distributed.checkpoint"
            own = seconds.get((operation, OWN.get(name, name)))
            cells.append(
                [
                    f"{operation}: {label}",
                    *timed_cells(row, 3, "seconds"),
                    ratio(row["seconds"], own) if name in OWN else "-",
                    "-" if name in (DISK, MEMCPY) else f"{row['extra'] / MIB:.1f}",
                ]
            )
    headers = ["operation", "seconds", *TIMED_HEADERS]
    headers += ["to fsdp_c", "extra memory (MiB)"]
    return format_table(headers, cells, markdown=markdown)


def render_all(data: Json, *, markdown: bool) -> str:
    """Return a table for each size, below its heading."""
    return "\n\n".join(
        f"{describe(size)}.\n\n{render(data, size, markdown=markdown)}"
        for size in dict.fromkeys(row["size"] for row in data["results"])
    )


def show(data: Json, args: argparse.Namespace) -> str:
    """Return all tables, and what they are about."""
    return (
        f"{NUM_RANKS} ranks, gloo groups; smallest of {args.rounds} medians of "
        f"{args.steps} ({LARGE}: a third), of the slowest rank\n\n"
        f"{render_all(data, markdown=args.markdown)}"
    )


def parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, steps=3, warmup=1, rounds=2)
    add = parser.add_argument
    add("--only", nargs="+", choices=IMPLEMENTATIONS)
    add("--size", choices=list(WIDTHS), help="one size (default: all)")
    add("--folder", type=Path, help="where to write checkpoints (default: /tmp)")
    return parser


if __name__ == "__main__":
    args = parser().parse_args()
    worker = state_dict_worker.run
    sys.exit(run_benchmark(args, worker=worker, measure=measure, show=show))
