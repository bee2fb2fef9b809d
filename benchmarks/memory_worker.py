"""One rank of the memory benchmark: train under a trace, then report its peaks."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from common import Json, joined_group, mean_over_ranks, report_result
from implementations import FSDP2, FSDP_C, NUM_BYTES, parallelise
from memory_trace import MemoryTrace, Peak, storages
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_c
from fsdp_c.tools.bench._workload import Transformer

FULL = "full"
LORA = "lora"
ACCUMULATE = "accumulate"
HSDP = "hsdp"
RECOMPUTE = "recompute"
BF16 = "bf16"
ACCUMULATES = (ACCUMULATE, HSDP)
NUM_REPLICAS = 2  # of HSDP
IN_BACKWARD = "in backward"  # how gradients are kept: one unit's, the optimizer steps

# How gradients are kept while they are accumulated: unsharded on every rank, or
# reduced within the shard group only.
UNSHARDED = "unsharded"
SHARDED = "sharded"

ONE_BYTE = "one byte"
BATCH = "batch"
NUM_WARMUP_STEPS = {ONE_BYTE: 2, BATCH: 1}
NUM_TRACED_STEPS = 2
SETTLE_S = 0.1  # gloo's threads free the last collective's buffers after it has ended


class Adapted(nn.Module):
    """A frozen linear layer plus a trainable product of two small matrices."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        """Freeze ``linear`` and put the adapter beside it."""
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        out: Tensor = self.linear(x) + self.up(self.down(x))
        return out


def create_model(args: argparse.Namespace) -> Transformer:
    """Return the same initial model on every rank and for every implementation."""
    torch.manual_seed(0)
    model = Transformer(
        args.dim,
        args.layers,
        args.heads,
        NUM_BYTES,
        recomputes=args.scenario == RECOMPUTE,
    )
    if args.scenario != LORA:
        return model
    model.requires_grad_(False)
    for block in model.blocks:
        for name, child in list(block.named_children()):
            if isinstance(child, nn.Linear):
                setattr(block, name, Adapted(child, args.lora_rank))
    return model


@contextlib.contextmanager
def accumulating(
    model: Any, implementation: str, accumulation: str, *, is_last: bool
) -> Iterator[None]:
    """Run one micro-batch's forward and backward in this context."""
    if implementation == FSDP2:
        if accumulation == SHARDED:
            model.set_requires_all_reduce(is_last)
        else:
            model.set_requires_gradient_sync(is_last)
        yield
    elif is_last:
        yield
    else:
        options = {"sharded": True} if accumulation == SHARDED else {}
        with model.no_sync(**options):
            yield


def _gradients(params: list[nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def _check_no_drift(name: str, peak: Peak) -> None:
    """Raise RuntimeError if memory grew from step to step."""
    if len(set(peak.at_begin)) > 1:
        raise RuntimeError(
            f"live bytes at the beginning of '{name}' differ from step to step: "
            f"{peak.at_begin}"
        )


def train(args: argparse.Namespace, trace: MemoryTrace) -> Json:
    """Train with one byte per rank, then with a batch; return what cannot be traced."""
    mesh = None
    if args.scenario == HSDP:
        shape = (NUM_REPLICAS, dist.get_world_size() // NUM_REPLICAS)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    param_dtype = torch.bfloat16 if args.scenario == BF16 else None
    model = parallelise(create_model(args), args.worker, mesh, param_dtype)
    params = [param for param in model.parameters() if param.requires_grad]
    trace.tag("parameters", model.parameters())

    def build(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-3, fused=True)

    steps_in_backward = args.accumulation == IN_BACKWARD
    if steps_in_backward:
        optimizer = fsdp_c.optimizer_in_backward(model, build)
    else:
        optimizer = build(params)
    num_micro_batches = args.micro_batches if args.scenario in ACCUMULATES else 1
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    last_loss = 0.0

    def step(name: str, batch: int, time: int) -> None:
        nonlocal last_loss
        tokens = torch.randint(
            NUM_BYTES, (num_micro_batches, batch, time + 1), generator=generator
        )
        for index, micro_batch in enumerate(tokens):
            is_last = index == num_micro_batches - 1
            with accumulating(model, args.worker, args.accumulation, is_last=is_last):
                trace.begin(f"{name}: forward")
                loss = model(micro_batch[:, :-1], micro_batch[:, 1:])
                trace.begin(f"{name}: backward")
                loss.backward()
            last_loss = loss.item()
            del loss
        trace.tag("gradients", _gradients(params))
        trace.begin(f"{name}: optimizer")
        if not steps_in_backward:
            optimizer.step()
            optimizer.zero_grad()
        trace.tag("optimizer state", _states(optimizer))

    for name, batch, time in ((ONE_BYTE, 1, 1), (BATCH, args.batch, args.time)):
        for _ in range(NUM_WARMUP_STEPS[name]):
            step("warm-up", batch, time)
        # fully_shard's shards move at the first forward.
        trace.tag("parameters", model.parameters())
        for _ in range(NUM_TRACED_STEPS):
            sleep(SETTLE_S)
            trace.begin(f"{name}: begin")
            step(name, batch, time)
        trace.begin("between")
    result: Json = {
        "loss": mean_over_ranks(torch.tensor(last_loss)),
        "parameters": sum(storages(model.parameters()).values()),
        "optimizer state": sum(storages(_states(optimizer)).values()),
    }
    if args.worker in FSDP_C:
        result["memory_stats"] = fsdp_c.memory_stats(model)
    return result


def run(args: argparse.Namespace) -> None:
    """Join the other ranks, train, and report."""
    os.environ["FSDP_C_TRANSPORT"] = "" if args.transport == "shm" else "c10d"
    with joined_group(args):
        trace = MemoryTrace()
        result = train(args, trace)
        if dist.get_rank() != 0:
            return
        peaks = trace.peaks()
        for name in (ONE_BYTE, BATCH):
            _check_no_drift(name, peaks[f"{name}: begin"])
        result["phases"] = {
            name: {
                "peak": peak.nbytes,
                "by_kind": peak.by_kind,
                "at_begin": peak.at_begin[0],
            }
            for name, peak in peaks.items()
        }
        report_result(args, result)
