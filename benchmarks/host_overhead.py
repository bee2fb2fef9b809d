"""Time that each implementation's own code adds to a step, per unit.

    python benchmarks/host_overhead.py

The tensors are tiny and a fake process group of 8 ranks needs no other ranks. The time
above the bare model is therefore the host's work: hooks, views, bookkeeping, launches.
The fake group still copies each rank's piece; that time is part of every sharded
implementation and is measured separately.
"""

import argparse
import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import (
    TIMED_HEADERS,
    Json,
    format_table,
    join_fake_group,
    make_parser,
    median_ms,
    ratio,
    report_result,
    results_of,
    run_benchmark,
    run_interleaved,
    timed_cells,
    timed_row,
)
from implementations import BARE, FSDP_C_C10D, FSDP_C_ORIG, LABELS, parallelise
from torch import nn

from fsdp_c.tools.bench._workload import Block

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


def create_fake_step() -> Callable[[], None]:
    """Return the collectives of a step alone: two gathers and one sum a unit."""
    join_fake_group(WORLD_SIZE)
    numel = sum(param.numel() for param in Block(WIDTH, NUM_HEADS).parameters())
    shard = torch.zeros(-(-numel // WORLD_SIZE))
    whole = torch.zeros(shard.numel() * WORLD_SIZE)

    def step() -> None:
        for _ in range(NUM_UNITS):
            dist.all_gather_into_tensor(whole, shard)
            dist.all_gather_into_tensor(whole, shard)
            dist.reduce_scatter_tensor(shard, whole)

    return step


def create_step(implementation: str) -> Callable[[], None]:
    """Return forward, backward and freeing of the gradients, in a fake group.

    All begin with a thread that has ended: libc's locks and malloc take shorter paths
    in a process that never had one, which no process with a real group is.
    """
    ended = threading.Thread()
    ended.start()
    ended.join()
    torch.manual_seed(0)
    join_fake_group(WORLD_SIZE)
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
    is_fake = args.worker == FAKE
    step = create_fake_step() if is_fake else create_step(args.worker)
    median = median_ms(step, num_steps=args.steps, num_warmup=args.warmup)
    report_result(args, {"step_ms": median})


def measure(args: argparse.Namespace) -> Json:
    """Run all implementations and return the results."""
    names = [BARE, *args.only] if args.only else IMPLEMENTATIONS
    options = ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    jobs = {name: [__file__, "--worker", name, *options] for name in (*names, FAKE)}
    results = run_interleaved(jobs, num_rounds=args.rounds, num_ranks=1)
    times = {name: timed_row(runs) for name, runs in results.items()}
    bare_ms = times[BARE]["step_ms"]

    def us_per_unit(ms: float) -> float:
        return ms * 1e3 / NUM_UNITS

    rows = [
        {
            "implementation": name,
            "added_us_per_unit": us_per_unit(times[name]["step_ms"] - bare_ms),
            **times[name],
        }
        for name in names
    ]
    fake = us_per_unit(times[FAKE]["step_ms"])
    return results_of("host_overhead", args, fake_group_us_per_unit=fake, results=rows)


def render(data: Json, *, markdown: bool) -> str:
    added = {row["implementation"]: row["added_us_per_unit"] for row in data["results"]}
    rows = [
        [
            LABELS[row["implementation"]],
            *timed_cells(row, 2),
            f"{row['added_us_per_unit']:.0f}",
            "-"
            if row["implementation"] == BARE
            else ratio(row["added_us_per_unit"], added.get(FSDP_C_ORIG)),
        ]
        for row in data["results"]
    ]
    headers = ["implementation", "step (ms)", *TIMED_HEADERS]
    headers += ["added per unit (us)", "to fsdp_c"]
    return format_table(headers, rows, markdown=markdown)


def show(data: Json, args: argparse.Namespace) -> str:
    """Return the table, and what it is about."""
    return (
        f"{NUM_UNITS} blocks of {PARAMS_PER_UNIT} parameters, fake process group of "
        f"{WORLD_SIZE} ranks; smallest of {args.rounds} medians of {args.steps} steps\n"
        f"\n{render(data, markdown=args.markdown)}\n"
        "the fake group's collectives alone, called from Python: "
        f"{data['fake_group_us_per_unit']:.0f} us per unit"
    )


def parser(
    doc: str | None = __doc__, steps: int = 60, warmup: int = 10, rounds: int = 3
) -> argparse.ArgumentParser:
    parser = make_parser(doc, steps=steps, warmup=warmup, rounds=rounds)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[name for name in IMPLEMENTATIONS if name != BARE],
        help="implementations to run (default: all)",
    )
    return parser


if __name__ == "__main__":
    args = parser().parse_args()
    sys.exit(run_benchmark(args, worker=run_worker, measure=measure, show=show))
