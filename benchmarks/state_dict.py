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
    Json,
    add_common_arguments,
    command_line,
    environment,
    environment_line,
    format_table,
    ratio,
    run_workers,
    smallest,
    write_json,
)
from implementations import (
    FSDP1_FLAT,
    FSDP1_ORIG,
    FSDP2,
    FSDP_C_FLAT,
    FSDP_C_ORIG,
    LABELS,
    why_unavailable,
)
from memory_trace import build_counter
from state_dict_worker import (
    DISK,
    LOAD,
    MEMCPY,
    NUM_RANKS,
    OPERATIONS,
    SAVE,
    WIDTHS,
)
from tqdm import tqdm

IMPLEMENTATIONS = [
    FSDP_C_ORIG,
    FSDP_C_FLAT,
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
    FSDP2: FSDP_C_ORIG,
    DISK: FSDP_C_ORIG,
    MEMCPY: FSDP_C_ORIG,
}
MIB = 2**20


def measure(
    names: list[str], *, sizes: list[str], steps: int, rounds: int, folder: Path | None
) -> Json:
    """Run all implementations that are available and return the results."""
    notices = []
    jobs = []
    for name in names:
        reason = why_unavailable(name)
        if reason is None:
            jobs += [(size, name) for size in sizes]
        else:
            notices.append(f"{NAMES[name]} left out: {reason}")
    results: dict[tuple[str, str], list[Json]] = {job: [] for job in jobs}
    with tempfile.TemporaryDirectory(prefix="fsdp_c-benchmark-", dir=folder) as own:
        environ = {"LD_PRELOAD": str(build_counter(Path(own)))}
        with tqdm(total=rounds * len(jobs), unit="run", leave=False) as bar:
            for index in range(rounds):
                for job in jobs[:: 1 if index % 2 == 0 else -1]:
                    size, name = job
                    bar.set_postfix_str(f"{size} {name}")
                    arguments = [__file__, "--worker", name, "--size", size]
                    arguments += ["--steps", str(steps), "--folder", own]
                    result = run_workers(
                        arguments, num_ranks=NUM_RANKS, environ=environ
                    )
                    results[job].append(result["operations"])
                    bar.update()
    rows = []
    for (size, name), runs in results.items():
        for operation in runs[0]:
            per_run = [run[operation] for run in runs]
            rows.append(
                {
                    "size": size,
                    "implementation": name,
                    "operation": operation,
                    "seconds": smallest(per_run, "seconds"),
                    "extra": max(run["extra"] for run in per_run),
                    "all_medians_s": [run["seconds"] for run in per_run],
                }
            )
    return {
        "benchmark": "state_dict",
        "command": command_line(),
        "environment": environment(),
        "settings": {"steps": steps, "rounds": rounds},
        "notices": notices,
        "results": rows,
    }


def describe(size: str) -> str:
    """Return a model and the bytes of its checkpoint in words."""
    numel = state_dict_worker.num_params(size)
    return (
        f"{numel / 1e6:.1f} M parameters, {3 * 4 * numel / 2**30:.2f} GiB with "
        "AdamW's state"
    )


def sizes_of(data: Json) -> list[str]:
    """Return the sizes that were run."""
    return list(dict.fromkeys(row["size"] for row in data["results"]))


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
                    f"{row['seconds']:.3f}",
                    ratio(row["seconds"], own) if name in OWN else "-",
                    "-" if name in (DISK, MEMCPY) else f"{row['extra'] / MIB:.1f}",
                ]
            )
    headers = ["operation", "seconds", "to fsdp_c", "extra memory (MiB)"]
    return format_table(headers, cells, markdown=markdown)


def main() -> int:
    """Run the benchmark, or one worker of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser, steps=3, warmup=1, rounds=2)
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS)
    parser.add_argument("--size", choices=list(WIDTHS), help="one size (default: all)")
    parser.add_argument(
        "--folder", type=Path, help="where to write checkpoints (default: /tmp)"
    )
    args = parser.parse_args()
    if args.worker is not None:
        state_dict_worker.run(args)
        return 0
    data = measure(
        args.only or IMPLEMENTATIONS,
        sizes=[args.size] if args.size else list(WIDTHS),
        steps=args.steps,
        rounds=args.rounds,
        folder=args.folder,
    )
    print(environment_line(data["environment"]))
    print(
        f"{NUM_RANKS} ranks, gloo groups; smallest of {args.rounds} medians of "
        f"{args.steps}, of the slowest rank"
    )
    for size in sizes_of(data):
        print(f"\n{describe(size)}")
        print(render(data, size, markdown=args.markdown))
    for notice in data["notices"]:
        print(notice, file=sys.stderr)
    if args.json is not None:
        write_json(Path(args.json), data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
