"""Time that each implementation's own code adds to a step, per unit.

    python benchmarks/host_overhead.py

The tensors are tiny and a fake process group of 8 ranks needs no other ranks. The time
above the bare model is therefore the host's work: hooks, views, bookkeeping, launches.
The fake group still copies each rank's piece; that time is part of every sharded
implementation and is measured separately.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from common import (
    Json,
    add_common_arguments,
    command_line,
    environment,
    environment_line,
    format_table,
    median_ms,
    ratio,
    report_result,
    run_interleaved,
    smallest,
    write_json,
)
from implementations import (
    BARE,
    FSDP_C_C10D,
    FSDP_C_ORIG,
    LABELS,
    Block,
    parallelise,
    why_unavailable,
)
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD_SIZE = 8
NUM_UNITS = 32
PARAMS_PER_UNIT = 16
WIDTH = 32
NUM_HEADS = 4
BATCH = 2
TIME = 8
# A fake group has no other transport than its own.
IMPLEMENTATIONS = [name for name in LABELS if name != FSDP_C_C10D]
FAKE = "fake group"


def all_reduce_hook(
    state: None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Do what DDP does by default, in a way that the fake group supports.

    The fake group's work has no result, which DDP's built-in reduction asserts on.
    DDP checks the annotations of its hooks, so this file cannot postpone them.
    """
    del state
    buffer = bucket.buffer().div_(WORLD_SIZE)
    dist.all_reduce(buffer)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def time_fake_group(*, num_steps: int, num_warmup: int) -> float:
    """Return the milliseconds of a step's collectives: two gathers a unit, one sum."""
    numel = sum(param.numel() for param in Block(WIDTH, NUM_HEADS).parameters())
    shard = torch.zeros(-(-numel // WORLD_SIZE))
    whole = torch.zeros(shard.numel() * WORLD_SIZE)

    def step() -> None:
        for _ in range(NUM_UNITS):
            dist.all_gather_into_tensor(whole, shard)
            dist.all_gather_into_tensor(whole, shard)
            dist.reduce_scatter_tensor(shard, whole)

    return median_ms(step, num_steps=num_steps, num_warmup=num_warmup)


def join_fake_group() -> None:
    """Use one thread, and a process group that needs no other ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())


def create_step(implementation: str) -> Callable[[], None]:
    """Return forward, backward and freeing of the gradients, in a fake group."""
    torch.manual_seed(0)
    join_fake_group()
    blocks = [Block(WIDTH, NUM_HEADS) for _ in range(NUM_UNITS)]
    num_params = len(list(blocks[0].parameters()))
    if num_params != PARAMS_PER_UNIT:
        raise AssertionError(f"{num_params} parameters in a block")
    model = parallelise(nn.Sequential(*blocks), implementation)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.register_comm_hook(None, all_reduce_hook)
    params = list(model.parameters())
    x = torch.randn(BATCH, TIME, WIDTH)

    def step() -> None:
        model(x).sum().backward()
        for param in params:
            param.grad = None

    return step


def run_worker(args: argparse.Namespace) -> None:
    """Time one implementation, or the fake group."""
    if args.worker == FAKE:
        join_fake_group()
        median = time_fake_group(num_steps=args.steps, num_warmup=args.warmup)
    else:
        step = create_step(args.worker)
        median = median_ms(step, num_steps=args.steps, num_warmup=args.warmup)
    report_result(args.worker_folder, {"step_ms": median})


def measure(
    implementations: list[str], *, steps: int, warmup: int, rounds: int
) -> Json:
    """Run all implementations that are available and return the results."""
    notices = []
    jobs = {}
    for name in implementations:
        reason = why_unavailable(name)
        if reason is not None:
            notices.append(f"{LABELS[name]} left out: {reason}")
            continue
        jobs[name] = [__file__, "--worker", name]
        jobs[name] += ["--steps", str(steps), "--warmup", str(warmup)]
    jobs[FAKE] = [__file__, "--worker", FAKE]
    jobs[FAKE] += ["--steps", str(steps), "--warmup", str(warmup)]
    results = run_interleaved(jobs, num_rounds=rounds, num_ranks=1)
    fake_ms = smallest(results.pop(FAKE), "step_ms")
    bare_ms = smallest(results[BARE], "step_ms")
    rows = []
    for name, runs in results.items():
        step_ms = smallest(runs, "step_ms")
        rows.append(
            {
                "implementation": name,
                "step_ms": step_ms,
                "added_us_per_unit": (step_ms - bare_ms) * 1e3 / NUM_UNITS,
                "all_medians_ms": [run["step_ms"] for run in runs],
            }
        )
    return {
        "benchmark": "host_overhead",
        "command": command_line(),
        "environment": environment(),
        "settings": {"steps": steps, "warmup": warmup, "rounds": rounds},
        "notices": notices,
        "fake_group_us_per_unit": fake_ms * 1e3 / NUM_UNITS,
        "results": rows,
    }


def render(data: Json, *, markdown: bool) -> str:
    """Return the results as a table."""
    added = {row["implementation"]: row["added_us_per_unit"] for row in data["results"]}
    rows = [
        [
            LABELS[row["implementation"]],
            f"{row['step_ms']:.2f}",
            f"{row['added_us_per_unit']:.0f}",
            "-"
            if row["implementation"] == BARE
            else ratio(row["added_us_per_unit"], added.get(FSDP_C_ORIG)),
        ]
        for row in data["results"]
    ]
    headers = ["implementation", "step (ms)", "added per unit (us)", "to fsdp_c"]
    return format_table(headers, rows, markdown=markdown)


def main() -> int:
    """Run the benchmark, or one worker of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser, steps=60, warmup=10, rounds=3)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[name for name in IMPLEMENTATIONS if name != BARE],
        help="implementations to run (default: all)",
    )
    args = parser.parse_args()
    if args.worker is not None:
        run_worker(args)
        return 0
    data = measure(
        [BARE, *args.only] if args.only else IMPLEMENTATIONS,
        steps=args.steps,
        warmup=args.warmup,
        rounds=args.rounds,
    )
    print(environment_line(data["environment"]))
    print(
        f"{NUM_UNITS} blocks of {PARAMS_PER_UNIT} parameters, fake process group of "
        f"{WORLD_SIZE} ranks; smallest of {args.rounds} medians of {args.steps} steps\n"
    )
    print(render(data, markdown=args.markdown))
    print(
        "the fake group's collectives alone, called from Python: "
        f"{data['fake_group_us_per_unit']:.0f} us per unit"
    )
    for notice in data["notices"]:
        print(notice, file=sys.stderr)
    if args.json is not None:
        write_json(Path(args.json), data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
