"""Time of a real training step on the ranks of one host, with gloo groups.

    python benchmarks/train_step.py [--ranks 4]

Forward, backward and optimizer step of GPTs, one thread per rank. The row that nobody
can beat is the bare model: as many processes, everything replicated, no communication.
Two sizes are measured in detail, with gloo's own time for the same collectives (not
with --only); the others are for step over size.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from common import (
    TIMED_HEADERS,
    Json,
    check_losses,
    format_table,
    joined_group,
    make_parser,
    mean_over_ranks,
    median_ms,
    ratio,
    report_result,
    results_of,
    run_benchmark,
    run_interleaved,
    spread,
    timed_cells,
    timed_row,
)
from implementations import (
    BARE,
    DDP,
    FSDP1_FLAT,
    FSDP1_ORIG,
    FSDP2,
    FSDP_C_C10D,
    FSDP_C_FULLY,
    FSDP_C_ORIG,
    LABELS,
    NUM_BYTES,
    parallelise,
)
from torch import nn

from fsdp_c._text import positive_int
from fsdp_c.tools.bench._report import smallest
from fsdp_c.tools.bench._workload import Transformer

NUM_RANKS = 2  # by default
BATCH = 2
TIME = 32
IMPLEMENTATIONS = [
    BARE,
    FSDP_C_ORIG,
    FSDP_C_C10D,
    FSDP_C_FULLY,
    FSDP1_ORIG,
    FSDP1_FLAT,
    FSDP2,
    DDP,
]
# Over all sizes, and on more ranks.
OVER_SIZE = [BARE, FSDP_C_ORIG, FSDP_C_FULLY, FSDP1_ORIG, FSDP2, DDP]
GLOO = "gloo"


@dataclass(frozen=True)
class ModelSize:
    """A GPT whose attention heads are 64 wide."""

    width: int
    num_blocks: int

    def create(self) -> Transformer:
        """Return the same initial model on every rank and in every run."""
        torch.manual_seed(0)
        return Transformer(self.width, self.num_blocks, self.width // 64, NUM_BYTES)

    def numels(self) -> tuple[int, int]:
        """Return the numel of one block and of the root unit."""
        with torch.device("meta"):
            model = self.create()
        block = sum(param.numel() for param in model.blocks[0].parameters())
        total = sum(param.numel() for param in model.parameters())
        return block, total - self.num_blocks * block


MODELS = {
    "1M": ModelSize(128, 4),
    "small": ModelSize(256, 8),
    "large": ModelSize(512, 8),
    "100M": ModelSize(1024, 8),
    "200M": ModelSize(1024, 16),
}
IN_DETAIL = ("small", "large")
# By default glibc gives freed memory at the top of its heap back to the kernel. Whether
# a step's is there depends on where the last tensor lies: the same bare model took 140
# or 182 ms.
KEPT_HEAP = {
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the largest that glibc takes
}
OVER_SIZE_ROUNDS = 2  # at most, of the others
FEWER_STEPS_FROM = 12e6  # parameters; a model of twice as many takes half the steps


@dataclass(frozen=True)
class Collective:
    """One kind of collective in a step, and how often it occurs."""

    name: str
    numel: int  # of the unsharded side
    num_calls: int


def collectives_of(size: ModelSize) -> dict[str, list[Collective]]:
    """Return the collectives of one step, for sharded training and for DDP.

    Sharded: a block is gathered for forward and again for backward, the root once.
    DDP's buckets are counted as one all_reduce of everything.
    """
    block, root = size.numels()
    return {
        "sharded": [
            Collective("all_gather", block, 2 * size.num_blocks),
            Collective("all_gather", root, 1),
            Collective("reduce_scatter", block, size.num_blocks),
            Collective("reduce_scatter", root, 1),
        ],
        "ddp": [Collective("all_reduce", size.num_blocks * block + root, 1)],
    }


def num_params(model: str) -> int:
    """Return the number of parameters of a model."""
    block, root = MODELS[model].numels()
    return MODELS[model].num_blocks * block + root


def num_of(steps: int, model: str) -> int:
    """Return how many of ``steps`` a model takes: fewer, if they are long."""
    share = min(1.0, FEWER_STEPS_FROM / num_params(model))
    return max(math.ceil(share * steps), min(2, steps))


def time_step(model: nn.Module, args: argparse.Namespace) -> Json:
    """Time training steps of a model on this rank's batch."""
    params = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(params, lr=1e-3, foreach=True)
    else:
        optimizer = torch.optim.SGD(params, lr=1e-2, foreach=True)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    tokens = torch.randint(NUM_BYTES, (BATCH, TIME + 1), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss = torch.zeros(())

    def step() -> None:
        nonlocal loss
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    median = median_ms(step, num_steps=args.steps, num_warmup=args.warmup)
    return {"step_ms": median, "loss": mean_over_ranks(loss)}


def time_gloo(args: argparse.Namespace) -> Json:
    """Time every collective of a step by itself."""
    rows: list[Json] = []
    (model,) = args.model
    num_ranks = dist.get_world_size()
    for kind, collectives in collectives_of(MODELS[model]).items():
        for collective in collectives:
            shard = torch.zeros(-(-collective.numel // num_ranks))
            whole = torch.zeros(shard.numel() * num_ranks)

            def call(
                name: str = collective.name,
                shard: torch.Tensor = shard,
                whole: torch.Tensor = whole,
            ) -> None:
                if name == "all_gather":
                    dist.all_gather_into_tensor(whole, shard)
                elif name == "reduce_scatter":
                    dist.reduce_scatter_tensor(shard, whole)
                else:
                    dist.all_reduce(whole)

            median = median_ms(call, num_steps=args.steps, num_warmup=args.warmup)
            row = {"kind": kind, **vars(collective), "call_ms": median}
            rows.append(row)
    return {"collectives": rows}


def run_worker(args: argparse.Namespace) -> None:
    """Join the other rank and time what is asked for."""
    with joined_group(args):
        if args.worker == GLOO:
            report_result(args, time_gloo(args))
        else:
            (size,) = args.model
            model = parallelise(MODELS[size].create(), args.worker)
            report_result(args, time_step(model, args))


def measure(args: argparse.Namespace) -> Json:
    """Run all implementations and return the results.

    Raises:
        RuntimeError: The implementations' losses differ: one trained wrongly.
    """
    models = args.model or list(MODELS)
    detailed = [model for model in models if args.model or model in IN_DETAIL]
    takes_gloo = args.only is None
    rows: list[Json] = []
    collectives: list[Json] = []
    jobs = {}
    for model in models:
        is_detailed = model in detailed
        options = ["--model", model, "--steps", str(num_of(args.steps, model))]
        options += ["--warmup", str(num_of(args.warmup, model))]
        options += ["--optimizer", args.optimizer]
        names = args.only or (IMPLEMENTATIONS if is_detailed else OVER_SIZE)
        jobs |= {
            f"{model} {name}": [__file__, "--worker", name, *options]
            for name in (*names, *([GLOO] if is_detailed and takes_gloo else []))
        }

    def rounds_of(job: str) -> int:
        is_detailed = job.partition(" ")[0] in detailed
        return args.rounds if is_detailed else min(args.rounds, OVER_SIZE_ROUNDS)

    results = run_interleaved(
        jobs,
        num_rounds=args.rounds,
        num_ranks=args.ranks,
        environ=KEPT_HEAP,
        rounds_of=rounds_of,
    )
    for model in models:
        names = [job.partition(" ")[2] for job in jobs if job.startswith(f"{model} ")]
        has_gloo = GLOO in names
        names = [name for name in names if name != GLOO]
        losses = {name: results[f"{model} {name}"][0]["loss"] for name in names}
        rows += [
            {
                "model": model,
                "implementation": name,
                "loss": losses[name],
                **timed_row(results[f"{model} {name}"]),
            }
            for name in names
        ]
        losses.pop(BARE, None)
        check_losses(model, losses)
        if not has_gloo:
            continue
        per_round = [run["collectives"] for run in results[f"{model} {GLOO}"]]
        for same in zip(*per_round, strict=True):
            best = {**same[0], "call_ms": smallest(same, "call_ms")}
            collectives.append({"model": model, **best})
    data = results_of("train_step", args, results=rows, collectives=collectives)
    data["settings"] |= {
        "optimizer": args.optimizer,
        "ranks": args.ranks,
        "in_detail": detailed,
    }
    return data


def describe(model: str) -> str:
    """Return the size of a model in words."""
    size = MODELS[model]
    million = num_params(model) / 1e6
    return f"{model}: {size.num_blocks} blocks, width {size.width}, {million:.1f} M"


def detailed_models(data: Json) -> list[str]:
    """Return the models that have a table each."""
    models: list[str] = data["settings"]["in_detail"]
    return models


def render_steps(data: Json, model: str, *, markdown: bool) -> str:
    """Return the step times of one model as a table."""
    results = [row for row in data["results"] if row["model"] == model]
    times = {row["implementation"]: row["step_ms"] for row in results}
    rows = []
    for row in results:
        name = row["implementation"]
        rows.append(
            [
                LABELS[name],
                *timed_cells(row, 1),
                ratio(row["step_ms"], times.get(FSDP_C_ORIG)),
                ratio(row["step_ms"], times.get(BARE)),
                "" if name == BARE else f"{row['loss']:.4f}",
            ]
        )
    headers = [
        "implementation",
        "step (ms)",
        *TIMED_HEADERS,
        "to fsdp_c",
        "to the bare model",
        "last loss",
    ]
    return format_table(headers, rows, markdown=markdown)


def over_size(data: Json) -> dict[str, dict[float, Json]]:
    """Return each implementation's rows by the model's millions of parameters."""
    found: dict[str, dict[float, Json]] = {name: {} for name in OVER_SIZE}
    for row in data["results"]:
        if row["implementation"] in found:
            million = num_params(row["model"]) / 1e6
            found[row["implementation"]][million] = row
    return found


def render_all(data: Json, *, markdown: bool) -> str:
    """Return the tables of the models that have one, below their names."""
    return "\n\n".join(
        f"{describe(model)} parameters.\n\n"
        + render_steps(data, model, markdown=markdown)
        for model in detailed_models(data)
    )


def render_over_size(data: Json, *, markdown: bool) -> str:
    """Return the steps of all sizes over those of the bare model as a table."""
    found = over_size(data)
    rows = []
    for million, bare in found[BARE].items():
        of_size = [each[million] for each in found.values() if million in each]
        rows.append(
            [
                f"{million:.1f} M",
                f"{bare['step_ms']:.1f}",
                *(
                    ratio(found[name][million]["step_ms"], bare["step_ms"])
                    if million in found[name]
                    else "-"
                    for name in OVER_SIZE[1:]
                ),
                f"{max(map(spread, of_size)):.0%}",
            ]
        )
    headers = ["parameters", "bare model (ms)", *(LABELS[n] for n in OVER_SIZE[1:])]
    return format_table([*headers, "largest spread"], rows, markdown=markdown)


def render_collectives(data: Json, *, markdown: bool) -> str:
    """Return gloo's own times as a table, with the sum of a step."""
    rows = []
    models = dict.fromkeys(row["model"] for row in data["collectives"])
    for model in models:
        for kind in ("sharded", "ddp"):
            total_ms = 0.0
            for row in data["collectives"]:
                if (row["model"], row["kind"]) != (model, kind):
                    continue
                step_ms = row["call_ms"] * row["num_calls"]
                total_ms += step_ms
                rows.append(
                    [
                        f"{model}, {kind}: {row['name']}",
                        f"{row['numel'] * 4 / 2**20:.2f}",
                        f"{row['call_ms']:.2f}",
                        str(row["num_calls"]),
                        f"{step_ms:.1f}",
                    ]
                )
            rows.append([f"{model}, {kind}: sum", "", "", "", f"{total_ms:.1f}"])
    headers = ["collective", "MiB", "call (ms)", "calls per step", "per step (ms)"]
    return format_table(headers, rows, markdown=markdown)


def show(data: Json, args: argparse.Namespace) -> str:
    """Return all tables, each below its heading."""
    parts = [
        f"{args.ranks} ranks, gloo groups, {BATCH} x {TIME} bytes per rank, "
        f"{args.optimizer}; smallest of {args.rounds} medians of {args.steps} steps"
    ]
    parts.append(render_all(data, markdown=args.markdown))
    parts.append(f"over size\n{render_over_size(data, markdown=args.markdown)}")
    if data["collectives"]:
        table = render_collectives(data, markdown=args.markdown)
        parts.append(f"gloo's own time\n{table}")
    return "\n\n".join(parts)


def parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, steps=20, warmup=5, rounds=3)
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS)
    parser.add_argument(
        "--model", nargs="+", choices=list(MODELS), help="sizes (default: all)"
    )
    parser.add_argument("--ranks", type=positive_int, default=NUM_RANKS)
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    return parser


if __name__ == "__main__":
    args = parser().parse_args()
    sys.exit(run_benchmark(args, worker=run_worker, measure=measure, show=show))
