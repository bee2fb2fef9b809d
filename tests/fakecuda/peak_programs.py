"""Peaks of small models that are trained in several ways, as JSON.

    FAKE_CUDA_NOOP=alone python -m fakecuda.peak_programs

This is rank 0 of ranks that do not exist.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fsdp_c
from fakecuda.alone import join_alone

WORLD_SIZE, TENSOR_PARALLEL = 4, 2
WIDTH, DEPTH, VOCABULARY, TOKENS = 1024, 8, 32768, 2048
DOORS = ("FullyShardedDataParallel", "fully_shard")


@dataclass(frozen=True)
class Case:
    """How a model is trained.

    Attributes:
        dtype: Of parameters in forward and backward.
        recomputes: The model checkpoints its blocks.
        frozen: Part of the names of parameters that are not trained.
        num_batches: Of a step.
        syncs: Whether all of them are reduced, not the last alone.
        use_orig_params: Of FullyShardedDataParallel.
        offloads: Shards are in host memory; there is no optimizer.
        keep_last: Blocks whose activations are not offloaded; 0: all of them.
        has_unused: A matrix of each block takes no part.
        is_tensor_parallel: TENSOR_PARALLEL ranks share each matrix of a block.
    """

    dtype: torch.dtype | None = torch.bfloat16
    recomputes: bool = False
    frozen: str | None = None
    num_batches: int = 1
    syncs: bool = True
    use_orig_params: bool = True
    offloads: bool = False
    keep_last: int = 0
    has_unused: bool = False
    is_tensor_parallel: bool = False

    @property
    def num_shards(self) -> int:
        """Ranks that shard what one of them has."""
        return WORLD_SIZE // TENSOR_PARALLEL if self.is_tensor_parallel else WORLD_SIZE

    def doors(self) -> Sequence[str]:
        """Which of DOORS train so."""
        return DOORS[1:] if self.is_tensor_parallel else DOORS


CASES = {
    "bf16": Case(),
    "fp32": Case(dtype=None),
    "recomputed": Case(recomputes=True),
    "frozen": Case(frozen="up"),
    "unused": Case(has_unused=True),
    "two-batches": Case(num_batches=2),
    "no-sync": Case(num_batches=2, syncs=False),
    "flat": Case(use_orig_params=False),
    "offloaded": Case(offloads=True),
    "offloaded-activations": Case(keep_last=1),
    "tensor-parallel": Case(is_tensor_parallel=True),
}


class Block(nn.Module):
    """A transformer's block without attention."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.recomputes = case.recomputes
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        if case.has_unused:
            self.unused = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, WIDTH] to the same."""
        if self.recomputes:
            out: Tensor = checkpoint(self._compute, x, use_reentrant=False)
            return out
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        inner = F.dropout(F.gelu(self.up(self.norm(x))), 0.1)
        out: Tensor = x + self.down(inner)
        return out


class Net(nn.Module):
    """Tokens in, loss out; embedding and head are the root's."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(case) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, param in self.named_parameters():
            if case.frozen is not None and case.frozen in name:
                param.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting ``tokens``, of shape [T]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float(), tokens)


def share(model: Net, mesh: DeviceMesh) -> None:
    """Let the ranks of ``mesh`` share the blocks' matrices."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def sharded(case: Case, door: str) -> Any:
    """Return a model on the device, made on meta; each block is a unit."""
    with torch.device("meta"):
        model = Net(case)
    if door == "FullyShardedDataParallel":
        return fsdp_c.FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(case.dtype, torch.float32),
            cpu_offload=CPUOffload(case.offloads),
            use_orig_params=case.use_orig_params,
            device_id=0,
            param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
        )
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(case.dtype, torch.float32)
    }
    if case.offloads:
        options["offload_policy"] = CPUOffloadPolicy()
    if case.is_tensor_parallel:
        shape = (case.num_shards, TENSOR_PARALLEL)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("data", "tensor"))
        share(model, mesh["tensor"])
        options["mesh"] = mesh["data"]
    for block in model.blocks:
        fsdp_c.fully_shard(block, **options)
    fsdp_c.fully_shard(model, **options)
    return model.to_empty(device="cpu" if case.offloads else "cuda")


@contextlib.contextmanager
def accumulating(model: Any, case: Case, *, is_last: bool) -> Iterator[None]:
    """Run one micro-batch's forward and backward in this context."""
    if case.syncs:
        yield
    elif isinstance(model, fsdp_c.FullyShardedDataParallel):
        with contextlib.nullcontext() if is_last else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(is_last)
        yield


def peak_of(case: Case, door: str) -> int:
    """Return the most that is allocated in the third step."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = sharded(case, door)
    if case.keep_last > 0:
        fsdp_c.offload_activations(model, keep_last=case.keep_last)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = None if case.offloads else torch.optim.AdamW(params, fused=True)
    tokens = torch.zeros(TOKENS, dtype=torch.long, device="cuda")
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        for index in range(case.num_batches):
            is_last = index + 1 == case.num_batches
            with accumulating(model, case, is_last=is_last):
                model(tokens).backward()
        if optimizer is not None:
            optimizer.step()
        for param in params:
            param.grad = None
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    """Print the peaks by case and door."""
    join_alone(WORLD_SIZE)
    peaks = {
        name: {door: peak_of(case, door) for door in case.doors()}
        for name, case in CASES.items()
    }
    print(json.dumps(peaks), flush=True)
    # Threads of torch may still ask the store, which is Python's, or let go of objects:
    # at the interpreter's end that ends the process by a signal, about once in eight.
    os._exit(0)


if __name__ == "__main__":
    main()
