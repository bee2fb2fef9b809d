"""Time and memory of a step of Muon on sharded matrices, on ranks of one host.

    python benchmarks/whole_parameters.py

torch.optim.Muon under fsdp_c's whole_parameter_optimizer, in both APIs, and on DTensors
of torch's FSDP2, beside steps that shard nothing: in one each rank does all of the
work, as with DDP; in one each rank steps its share of the matrices and nothing travels;
in one a process is alone. An ideal step takes the last one's time divided by the number
of ranks, or of cores where these are fewer. Newton-Schulz is in fp32 everywhere, since
CPUs without bf16 units multiply bf16 in software.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from common import (
    TIMED_HEADERS,
    Json,
    format_table,
    joined_group,
    make_parser,
    ratio,
    report_result,
    results_of,
    run_benchmark,
    run_interleaved,
    timed_cells,
    timed_row,
)
from torch import nn

import fsdp_c

ALONE = "alone"
SHARE = "share"
REPLICATED = "replicated"
FSDP2 = "fsdp2"
FSDP_C = "fsdp_c"
FSDP_C_FULLY = "fsdp_c_fully"
NAMES = {
    FSDP_C: "FullyShardedDataParallel, fsdp_c",
    FSDP_C_FULLY: "fully_shard, fsdp_c",
    FSDP2: "fully_shard, torch: DTensors",
    REPLICATED: "each rank steps all (DDP)",
    SHARE: "each rank steps its share, nothing travels",
    ALONE: "one process alone, unsharded",
}
# Shapes of a layer, and the number of layers.
MODELS = {
    "64 matrices of 512 x 512": ([(512, 512)] * 4, 16),
    "the matrices of a GPT of 100 M": (
        [(2304, 768), (768, 768), (3072, 768), (768, 3072)],
        12,
    ),
}


class Layer(nn.Module):
    """Matrices without a forward: only their step is measured."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(shape) / 32 for shape in shapes)


def muon(params: Any) -> torch.optim.Optimizer:
    """Return Muon over parameters, or over groups of them."""
    return torch.optim.Muon(params, lr=0.01)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Shard the model as the implementation does, and return its optimizer."""
    if name in (REPLICATED, ALONE):
        return muon(model.parameters())
    if name == SHARE:
        return muon(list(model.parameters())[dist.get_rank() :: dist.get_world_size()])
    if name == FSDP_C:
        wrapped: Any = fsdp_c.FSDP(
            model,
            auto_wrap_policy=torch_fsdp.wrap.ModuleWrapPolicy({Layer}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        return fsdp_c.whole_parameter_optimizer(wrapped, muon)
    shard: Any = torch_fsdp.fully_shard if name == FSDP2 else fsdp_c.fully_shard
    for layer in model.children():
        shard(layer)
    shard(model)
    if name == FSDP2:
        return muon(model.parameters())
    return fsdp_c.whole_parameter_optimizer(model, muon)


def work(args: argparse.Namespace) -> None:
    """Time the steps of one implementation, and report the slowest rank's."""
    torch.Tensor.bfloat16 = lambda tensor: tensor  # type: ignore[method-assign, assignment]
    shapes, num_layers = MODELS[args.model]
    torch.manual_seed(0)
    with joined_group(args):
        model = nn.Sequential(*(Layer(shapes) for _ in range(num_layers)))
        optimizer = optimizer_of(args.worker, model)
        params = [each for group in optimizer.param_groups for each in group["params"]]
        for param in params:
            param.grad = torch.randn_like(param)
        times = []
        for index in range(args.warmup + args.steps):
            dist.barrier()
            gc.disable()
            begin = time.perf_counter()
            if args.worker != ALONE or dist.get_rank() == 0:
                optimizer.step()
            seconds = torch.tensor(time.perf_counter() - begin)
            gc.enable()
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if index >= args.warmup:
                times.append(seconds.item())
        inner = getattr(optimizer, "optimizer", optimizer)
        state = [
            value.to_local() if hasattr(value, "to_local") else value
            for each in inner.state.values()
            for value in each.values()
            if isinstance(value, torch.Tensor)
        ]
        nbytes = torch.tensor(sum(each.numel() * each.itemsize for each in state))
        dist.all_reduce(nbytes, dist.ReduceOp.MAX)
        report_result(args, {"seconds": statistics.median(times), "state": int(nbytes)})


def measure(args: argparse.Namespace) -> Json:
    """Run all implementations and return the results."""
    rows = []
    for num_ranks in args.ranks:
        jobs = {
            f"{model}|{name}": [
                *(__file__, "--worker", name, "--model", model),
                *("--steps", str(args.steps), "--warmup", str(args.warmup)),
            ]
            for model in ([args.model] if args.model else MODELS)
            for name in args.only or NAMES
        }
        results = run_interleaved(jobs, num_rounds=args.rounds, num_ranks=num_ranks)
        for job, runs in results.items():
            model, _, name = job.partition("|")
            rows.append(
                {
                    "model": model,
                    "ranks": num_ranks,
                    "implementation": name,
                    "state": runs[0]["state"],
                    **timed_row(runs, "seconds"),
                }
            )
    return results_of("whole_parameters", args, results=rows)


def show(data: Json, args: argparse.Namespace) -> str:
    """Return a table for each model and number of ranks."""
    tables = []
    kinds = dict.fromkeys((row["model"], row["ranks"]) for row in data["results"])
    for model, num_ranks in kinds:
        rows = [
            row
            for row in data["results"]
            if (row["model"], row["ranks"]) == (model, num_ranks)
        ]
        seconds = {row["implementation"]: row["seconds"] for row in rows}
        whole = seconds.get(ALONE)
        ideal = None if whole is None else whole / min(num_ranks, os.cpu_count() or 1)
        cells = [
            [
                NAMES[row["implementation"]],
                *timed_cells(row, 3, "seconds"),
                ratio(row["seconds"], ideal),
                ratio(seconds.get(FSDP2, 0.0), row["seconds"]),
                f"{row['state'] / 2**20:.1f}",
            ]
            for row in rows
        ]
        headers = ["step", "seconds", *TIMED_HEADERS, "to ideal", "FSDP2 to it"]
        headers.append("largest state (MiB)")
        table = format_table(headers, cells, markdown=args.markdown)
        tables.append(f"{model}, {num_ranks} ranks\n\n{table}")
    return "\n\n".join(tables)


def parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, steps=3, warmup=1, rounds=2)
    add = parser.add_argument
    add("--only", nargs="+", choices=list(NAMES))
    add("--model", choices=list(MODELS), help="one model (default: all)")
    add("--ranks", nargs="+", type=int, default=[2], help="numbers of ranks")
    return parser


if __name__ == "__main__":
    args = parser().parse_args()
    sys.exit(run_benchmark(args, worker=work, measure=measure, show=show))
