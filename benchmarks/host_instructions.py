"""Instructions that each implementation's own code adds to a step, per unit.

    python benchmarks/host_instructions.py

Runs the model and fake group of host_overhead.py under valgrind (callgrind). Other
processes change times, but hardly change the instructions executed. Stalls on memory
and work in the kernel are not counted. The instructions of the fake group's own
collectives, which a real group does not run, are a column of their own. glibc copies
with vector instructions here: callgrind would count a `rep movsb` once per byte.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import host_overhead
from common import (
    COUNTED_AT_ONCE,
    Json,
    format_table,
    ratio,
    report_result,
    results_of,
    run_benchmark,
    run_interleaved,
)
from host_overhead import IMPLEMENTATIONS, NUM_UNITS, create_step
from implementations import BARE, FSDP_C_ORIG, LABELS

OUTPUT = "callgrind.out"
FAKE_GROUP = "c10d::FakeProcessGroup::"
TUNABLES = "glibc.cpu.x86_rep_movsb_threshold=0x40000000"


def count_here(implementation: str, folder: Path, *, steps: int, warmup: int) -> None:
    """Run the steps in this process, which valgrind runs; it writes the counts."""

    def control(command: str) -> None:
        subprocess.run(
            ["callgrind_control", command, str(os.getpid())],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    step = create_step(implementation)
    for _ in range(warmup):
        step()
    control("--instr=on")
    control("--zero")
    for _ in range(steps):
        step()
    control("--dump")
    (folder / "is_counted").touch()
    os._exit(0)  # nothing of the interpreter's end, which is slow here


def read_counts(folder: Path) -> tuple[int, int]:
    """Return the instructions of the only dump: all, and those of the fake group.

    A call of a function is ``cfn=``, ``calls=`` and a line with its inclusive cost.

    Raises:
        RuntimeError: There is no dump.
    """
    for path in sorted(folder.glob(f"{OUTPUT}.*")):
        names: dict[str, str] = {}
        total = fake = 0
        caller = called = ""
        is_call = False
        for line in path.read_text(errors="replace").splitlines():
            key, _, value = line.partition("=")
            if key in ("fn", "cfn"):
                number, _, name = value.partition(" ")
                name = names.setdefault(number, name)
                caller, called = (name, called) if key == "fn" else (caller, name)
            elif is_call and FAKE_GROUP in called and FAKE_GROUP not in caller:
                fake += int(line.split()[1])
            elif line.startswith("totals:"):
                total = int(line.split()[1])
            is_call = key == "calls"
        if total > 0:
            return total, fake
    raise RuntimeError(f"valgrind wrote no counts into {folder}")


def run_worker(args: argparse.Namespace) -> None:
    """Count one implementation in a process under valgrind."""
    folder: Path = args.worker_folder
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
    command += [f"--callgrind-out-file={folder / OUTPUT}", sys.executable, __file__]
    command += ["--counted", args.worker, "--worker-folder", str(folder)]
    command += ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    tunables = {**os.environ, "GLIBC_TUNABLES": TUNABLES}
    subprocess.run(command, check=False, env=tunables)  # the file tells
    if not (folder / "is_counted").exists():
        raise RuntimeError(f"{LABELS[args.worker]} did not run under valgrind")
    total, fake = read_counts(folder)
    report_result(
        args, {"instructions": total / args.steps, "fake_group": fake / args.steps}
    )


def measure(args: argparse.Namespace) -> Json:
    """Count all implementations and return the results.

    Raises:
        RuntimeError: valgrind is not installed.
    """
    for program in ("valgrind", "callgrind_control"):
        if shutil.which(program) is None:
            raise RuntimeError(f"{program} is not there: install valgrind")
    names = [BARE, *args.only] if args.only else IMPLEMENTATIONS
    options = ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    jobs = {name: [__file__, "--worker", name, *options] for name in names}
    results = run_interleaved(
        jobs, num_rounds=1, num_ranks=1, num_at_once=COUNTED_AT_ONCE
    )
    counts = {name: runs[0] for name, runs in results.items()}
    bare = counts[BARE]["instructions"]
    rows = [
        {
            "implementation": name,
            "instructions_per_step": count["instructions"],
            "fake_group_per_unit": count["fake_group"] / NUM_UNITS,
            "added_per_unit": (count["instructions"] - bare - count["fake_group"])
            / NUM_UNITS,
        }
        for name, count in counts.items()
    ]
    return results_of("host_instructions", args, results=rows)


def render(data: Json, *, markdown: bool) -> str:
    added = {row["implementation"]: row["added_per_unit"] for row in data["results"]}
    rows = [
        [
            LABELS[row["implementation"]],
            f"{row['instructions_per_step'] / 1e6:.1f}",
            f"{row['fake_group_per_unit'] / 1e3:.0f}",
            f"{row['added_per_unit'] / 1e3:.0f}",
            "-"
            if row["implementation"] == BARE
            else ratio(row["added_per_unit"], added.get(FSDP_C_ORIG)),
        ]
        for row in data["results"]
    ]
    headers = ["implementation", "step (million)", "fake group per unit (thousand)"]
    headers += ["added per unit (thousand)", "to fsdp_c"]
    return format_table(headers, rows, markdown=markdown)


def show(data: Json, args: argparse.Namespace) -> str:
    """Return the table, and what it is about."""
    return (
        f"{args.steps} steps after {args.warmup}, instructions in user space\n\n"
        f"{render(data, markdown=args.markdown)}"
    )


def parser() -> argparse.ArgumentParser:
    parser = host_overhead.parser(__doc__, steps=2, warmup=4, rounds=1)
    parser.add_argument("--counted", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    args = parser().parse_args()
    if args.counted is not None:
        count_here(
            args.counted, args.worker_folder, steps=args.steps, warmup=args.warmup
        )
    sys.exit(run_benchmark(args, worker=run_worker, measure=measure, show=show))
