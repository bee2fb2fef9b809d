"""What recording a timeline adds to a step.

    python benchmarks/trace_overhead.py

One process runs steps with and without fsdp_c.trace, in turns of a few steps. The
result is the median of the ratios of neighbouring turns, so that another process which
is busy for a while affects both. Two models: tiny tensors, where nearly all time is the
host's (a fake process group of 8 ranks), and one with a usual share of compute (2 gloo
ranks).
"""

import argparse
import statistics
import sys
from dataclasses import dataclass

import torch
from common import (
    Json,
    format_table,
    join_fake_group,
    joined_group,
    make_parser,
    median_ms,
    report_result,
    results_of,
    run_benchmark,
    run_interleaved,
)
from implementations import FSDP_C_ORIG, parallelise
from torch import nn

from fsdp_c import trace
from fsdp_c.tools.bench._workload import Block

STEPS_PER_TURN = 5


@dataclass(frozen=True)
class Setting:
    """A model and its input."""

    num_units: int
    width: int
    num_tokens: int
    num_ranks: int
    text: str


SETTINGS = {
    "tiny": Setting(32, 32, 8, 1, "32 blocks of width 32, fake group of 8 ranks"),
    "usual": Setting(6, 256, 64, 2, "6 blocks of width 256, 2 gloo ranks"),
}


def train(setting: Setting, args: argparse.Namespace) -> Json:
    """Time turns of steps without and with a recording."""
    torch.manual_seed(0)
    blocks = [Block(setting.width, 4) for _ in range(setting.num_units)]
    model = parallelise(nn.Sequential(*blocks), FSDP_C_ORIG)
    params = list(model.parameters())
    x = torch.randn(2, setting.num_tokens, setting.width)

    def step() -> None:
        model(x).sum().backward()
        for param in params:
            param.grad = None

    def time_turn() -> float:
        return median_ms(step, num_steps=STEPS_PER_TURN, num_warmup=0)

    for _ in range(args.warmup):
        step()
    plain, recorded, num_spans = [], [], 0
    for index in range(max(args.steps // STEPS_PER_TURN, 2)):
        for is_on in (False, True) if index % 2 == 0 else (True, False):
            if not is_on:
                plain.append(time_turn())
                continue
            timeline = trace.start(model, STEPS_PER_TURN)
            recorded.append(time_turn())
            num_spans = len(timeline.stop().recorded.spans) // STEPS_PER_TURN
    return {"plain": plain, "recorded": recorded, "spans": num_spans}


def run_worker(args: argparse.Namespace) -> None:
    """Time one setting."""
    setting = SETTINGS[args.worker]
    if setting.num_ranks == 1:
        join_fake_group(world_size=8)
        report_result(args, train(setting, args))
        return
    with joined_group(args):
        report_result(args, train(setting, args))


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
    return results_of("trace_overhead", args, results=rows)


def show(data: Json, args: argparse.Namespace) -> str:
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
    return format_table(headers, rows, markdown=args.markdown)


if __name__ == "__main__":
    args = make_parser(__doc__, steps=200, warmup=5, rounds=2).parse_args()
    sys.exit(run_benchmark(args, worker=run_worker, measure=measure, show=show))
