"""Device memory with activations in host memory, on a GPU or the fake CUDA.

    PYTHONPATH=tests python -m fakecuda python benchmarks/offload.py

Peak bytes of the device's allocator in a step of the transformer of memory.py, AdamW
on 2 ranks: with all activations on the device, with `fsdp_c.offload_activations`, with
activation checkpointing, and with both. The ranks share one GPU where there is one.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from common import (
    Json,
    check_losses,
    format_table,
    joined_group,
    make_parser,
    mean_over_ranks,
    report_result,
    results_of,
    run_benchmark,
    starting_workers,
)
from implementations import NUM_BYTES
from tqdm import tqdm

import fsdp_c
from fsdp_c.tools.bench._workload import Block, Transformer

MIB = 2**20
NUM_RANKS = 2
NUM_STEPS = 3
LAYERS, WIDTH, HEADS = 8, 256, 4
BATCH, TIME = 4, 64
MIN_BYTES = 16 * 1024
WAYS = {  # whether activations are offloaded, and recomputed
    "all on the device": (False, False),
    "offload_activations": (True, False),
    "checkpointing": (False, True),
    "checkpointing and offload_activations": (True, True),
}


def _train(offloads: bool, recomputes: bool) -> Json:
    torch.manual_seed(0)
    model = Transformer(WIDTH, LAYERS, HEADS, NUM_BYTES, recomputes=recomputes)
    for module in model.modules():
        if isinstance(module, Block):
            fsdp_c.fully_shard(module)
    fsdp_c.fully_shard(model)
    if offloads:
        fsdp_c.offload_activations(model, min_bytes=MIN_BYTES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    for _ in range(NUM_STEPS):
        shape = (BATCH, TIME + 1)
        tokens = torch.randint(NUM_BYTES, shape, generator=generator, device="cpu")
        tokens = tokens.to("cuda")
        torch.cuda.reset_peak_memory_stats()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        optimizer.step()
        optimizer.zero_grad()
        last = loss.detach().cpu()
        del loss
    stats = fsdp_c.memory_stats(model)
    return {
        "loss": mean_over_ranks(last),
        "device": peak,
        "host": stats["peak_offloaded_nbytes"],
        "copies": stats["num_downloads"] // NUM_STEPS,
    }


def worker(args: argparse.Namespace) -> None:
    """Train on one rank."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from helpers.one_gpu import gpu_of_rank

    rank = int(os.environ["RANK"])
    gpu, variables = gpu_of_rank(rank, NUM_RANKS, torch.cuda.device_count())
    os.environ.update(variables)
    torch.cuda.set_device(gpu)
    torch.set_default_device("cuda")
    with joined_group(args, "cpu:gloo,cuda:nccl"):
        report_result(args, _train(*WAYS[args.worker]))


def measure(args: argparse.Namespace) -> Json:
    """Train in each way.

    Raises:
        RuntimeError: The losses differ: one trained wrongly.
    """
    with starting_workers(1) as run:
        rows = {
            way: run([__file__, "--worker", way], NUM_RANKS)
            for way in tqdm(WAYS, unit="run", leave=False)
        }
    check_losses("offload", {way: row["loss"] for way, row in rows.items()})
    return results_of("offload", args, results=rows)


def render(data: Json, *, markdown: bool) -> str:
    rows = data["results"]
    most = rows[next(iter(WAYS))]["device"]
    cells = [
        [
            way,
            f"{row['device'] / MIB:.1f}",
            f"{row['device'] / most:.3f}",
            f"{row['host'] / MIB:.1f}",
            str(row["copies"]),
        ]
        for way, row in rows.items()
    ]
    headers = ["activations", "peak on the device (MiB)", "to all on the device"]
    headers += ["in host memory (MiB)", "copies each way"]
    return format_table(headers, cells, markdown=markdown)


def show(data: Json, args: argparse.Namespace) -> str:
    """Return the same, as asked for."""
    return render(data, markdown=args.markdown)


def parser() -> argparse.ArgumentParser:
    return make_parser(__doc__)


if __name__ == "__main__":
    args = parser().parse_args()
    sys.exit(run_benchmark(args, worker=worker, measure=measure, show=show))
