"""What recording a timeline adds to a step.

    python benchmarks/trace_overhead.py

One process runs steps with and without fsdp_c.trace, in turns of a few steps. The
result is the median of the ratios of neighbouring turns, so that another process which
is busy for a while affects both. Two models: tiny tensors, where nearly all time is the
host's (a fake process group of 8 ranks), and one with a usual share of compute (2 gloo
ranks).
"""

import argparse
import os
import statistics
import sys
import time
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
    report_result,
    run_interleaved,
    write_json,
)
from implementations import FSDP_C_ORIG, Block, parallelise
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_c import trace

STEPS_PER_TURN = 5


class Setting:
    """A model and its input."""

    def __init__(
        self, num_units: int, width: int, num_tokens: int, num_ranks: int, text: str
    ) -> None:
        self.num_units = num_units
        self.width = width
        self.num_tokens = num_tokens
        self.num_ranks = num_ranks
        self.text = text


SETTINGS = {
    "tiny": Setting(32, 32, 8, 1, "32 blocks of width 32, fake group of 8 ranks"),
    "usual": Setting(6, 256, 64, 2, "6 blocks of width 256, 2 gloo ranks"),
}


def start_group(setting: Setting, folder: Path) -> None:
    """Join the process group of this setting."""
    if setting.num_ranks == 1:
        dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
        return
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(os.environ["RANK"]),
        world_size=setting.num_ranks,
    )


def time_turn(step: Callable[[], None]) -> float:
    """Return the median time of a few steps, in ms."""
    times = []
    for _ in range(STEPS_PER_TURN):
        begin = time.perf_counter_ns()
        step()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e6


def run_worker(args: argparse.Namespace) -> None:
    """Time turns of steps without and with a recording."""
    setting = SETTINGS[args.worker]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start_group(setting, args.worker_folder)
    blocks = [Block(setting.width, 4) for _ in range(setting.num_units)]
    model = parallelise(nn.Sequential(*blocks), FSDP_C_ORIG)
    params = list(model.parameters())
    x = torch.randn(2, setting.num_tokens, setting.width)

    def step() -> None:
        model(x).sum().backward()
        for param in params:
            param.grad = None

    for _ in range(args.warmup):
        step()
    plain, recorded, num_spans = [], [], 0
    for index in range(max(args.steps // STEPS_PER_TURN, 2)):
        for is_on in (False, True) if index % 2 == 0 else (True, False):
            if not is_on:
                plain.append(time_turn(step))
                continue
            timeline = trace.start(model, STEPS_PER_TURN)
            recorded.append(time_turn(step))
            num_spans = len(timeline.stop().recorded.spans) // STEPS_PER_TURN
    if dist.get_rank() == 0:
        report_result(
            args.worker_folder,
            {"plain": plain, "recorded": recorded, "spans": num_spans},
        )
    dist.destroy_process_group()


def measure(args: argparse.Namespace) -> Json:
    """Run both settings and return the results."""
    rows = []
    for name, setting in SETTINGS.items():
        words = [__file__, "--worker", name, "--steps", str(args.steps)]
        words += ["--warmup", str(args.warmup)]
        (runs,) = run_interleaved(
            {name: words}, num_rounds=args.rounds, num_ranks=setting.num_ranks
        ).values()
        pairs = [
            (plain, recorded)
            for run in runs
            for plain, recorded in zip(run["plain"], run["recorded"], strict=True)
        ]
        ratios = sorted(recorded / plain for plain, recorded in pairs)
        rows.append(
            {
                "setting": setting.text,
                "plain_ms": statistics.median(plain for plain, _ in pairs),
                "spans": runs[0]["spans"],
                "ratio": statistics.median(ratios),
                "quartiles": statistics.quantiles(ratios, n=4),
                "num_pairs": len(pairs),
            }
        )
    return {
        "benchmark": "trace_overhead",
        "command": command_line(),
        "environment": environment(),
        "results": rows,
    }


def render(data: Json, *, markdown: bool) -> str:
    """Return the results as a table."""
    headers = ["model", "step (ms)", "spans a step", "recorded / not", "quartiles"]
    rows = [
        [
            row["setting"],
            f"{row['plain_ms']:.2f}",
            f"{row['spans']}",
            f"{row['ratio']:.4f}",
            f"{row['quartiles'][0]:.3f} to {row['quartiles'][2]:.3f}",
        ]
        for row in data["results"]
    ]
    return format_table(headers, rows, markdown=markdown)


def main() -> int:
    """Run the benchmark, or one worker of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser, steps=200, warmup=5, rounds=2)
    args = parser.parse_args()
    if args.worker is not None:
        run_worker(args)
        return 0
    data = measure(args)
    print(environment_line(data["environment"]))
    print(render(data, markdown=args.markdown))
    if args.json is not None:
        write_json(args.json, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
