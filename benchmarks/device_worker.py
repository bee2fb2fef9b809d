"""Rank 0 of device.py: one model, sharded by one implementation, on the fake CUDA."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import Json, report_result
from device_models import Block, Model, make_model, share_matrices
from device_rows import (
    DEVICE_NBYTES,
    PARAM_DTYPE,
    REDUCE_DTYPE,
    ROWS,
    UNSYNC,
    Row,
)
from implementations import BARE, FSDP1_ORIG, FSDP2, FSDP_C_FULLY, FSDP_C_ORIG
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import fsdp_c
from fakecuda.alone import join_alone
from fakecuda.device import count, set_behind

COUNTED = (
    *("event_records", "event_waits", "event_creates", "event_queries"),
    *("pointer_queries", "synchronizations", "mallocs", "memcpys"),
    *("launches", "operators"),
)
COLLECTIVES = "collectives"
NUM_WARMUP = 2
# The bare model is compared in calls and time, also where no device holds it.
BARE_NBYTES = 4 << 40


def mesh_of(model: Model, row: Row) -> DeviceMesh:
    """Return the mesh that shards; share the blocks' matrices among the others."""
    if row.tensor_parallel == 1:
        return init_device_mesh("cuda", (row.num_ranks,))
    shape = (row.num_ranks // row.tensor_parallel, row.tensor_parallel)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("data", "tensor"))
    share_matrices(model, mesh["tensor"])
    return mesh["data"]


def parallelise(model: Model, name: str, row: Row) -> nn.Module:
    """Return ``model`` on the device, run by an implementation; a unit a block."""
    if name == BARE:
        if row.tensor_parallel > 1:
            mesh_of(model, row)
        return model.to(PARAM_DTYPE).to_empty(device="cuda")
    if name in (FSDP_C_ORIG, FSDP1_ORIG):
        wrapper: Any = fsdp.FullyShardedDataParallel
        if name == FSDP_C_ORIG:
            wrapper = fsdp_c.FullyShardedDataParallel
        wrapped: nn.Module = wrapper(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=fsdp.MixedPrecision(PARAM_DTYPE, REDUCE_DTYPE),
            cpu_offload=fsdp.CPUOffload(offload_params=row.offloads),
            use_orig_params=True,
            device_id=0,
            param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
        )
        return wrapped
    shard: Any = fsdp_c.fully_shard if name == FSDP_C_FULLY else fsdp.fully_shard
    options: Json = {
        "mesh": mesh_of(model, row),
        "mp_policy": fsdp.MixedPrecisionPolicy(PARAM_DTYPE, REDUCE_DTYPE),
    }
    if row.offloads:
        options["offload_policy"] = fsdp.CPUOffloadPolicy()
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)
    return model.to_empty(device="cpu" if row.offloads else "cuda")


@contextlib.contextmanager
def accumulating(model: Any, name: str, row: Row, *, is_last: bool) -> Iterator[None]:
    """Run one micro-batch's forward and backward in this context."""
    if name == BARE or row.accumulation != UNSYNC:
        yield
    elif name in (FSDP2, FSDP_C_FULLY):
        model.set_requires_gradient_sync(is_last)
        yield
    else:
        with contextlib.nullcontext() if is_last else model.no_sync():
            yield


def counts() -> Json:
    """Return how often each call was made so far."""
    nccl = ctypes.CDLL(None).fake_nccl_num_launches
    nccl.restype = ctypes.c_longlong
    return {**{name: count(name) for name in COUNTED}, COLLECTIVES: int(nccl())}


def max_memory_active() -> int:
    """Return the most that was allocated, or freed and not over on the device."""
    return int(torch.cuda.memory_stats()["active_bytes.all.peak"])


class Trainer:
    """The model, its optimizer and what a step of it holds."""

    def __init__(self, name: str, row: Row) -> None:
        """Make everything on the device."""
        self._name, self._row = name, row
        model = make_model(row.size, recomputes=row.recomputes, lora=row.lora)
        self._plain = model
        self._model = parallelise(model, name, row)
        params = [each for each in self._model.parameters() if each.requires_grad]
        # A fused call takes tensors of one mesh.
        groups: dict[Any, list[nn.Parameter]] = {}
        for each in params:
            mesh = each.device_mesh if isinstance(each, DTensor) else None
            groups.setdefault(mesh, []).append(each)
        by_mesh = [{"params": group} for group in groups.values()]
        # With offloading the optimizer is the host's, and touches its memory.
        self._optimizer = (
            None if row.offloads else torch.optim.AdamW(by_mesh, lr=1e-3, fused=True)
        )
        self._params = params
        self._tokens = torch.zeros(row.num_tokens, dtype=torch.long, device="cuda")
        self.held: Json = {}

    def _note(self, what: str) -> None:
        self.held[what] = torch.cuda.memory_allocated()

    def _forward_and_backward(self) -> None:
        num_batches = 1 if self._row.accumulation is None else 2
        for index in range(num_batches):
            is_last = index == num_batches - 1
            with accumulating(self._model, self._name, self._row, is_last=is_last):
                loss = self._model(self._tokens)
                self._note("forward_end")
                loss.backward()
                del loss

    def _optimizer_step(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
        for param in self._params:
            param.grad = None

    def step(self) -> None:
        self._forward_and_backward()
        self._optimizer_step()

    def watched_step(self) -> None:
        """Train once and note what is held when."""
        self.held = {}
        torch.cuda.reset_peak_memory_stats()
        self._plain.at_last_block = lambda: self._note("backward_begin")
        self._note("begin")
        self._forward_and_backward()
        self._plain.at_last_block = lambda: None
        backward = torch.cuda.max_memory_allocated()
        reserved, active = torch.cuda.max_memory_reserved(), max_memory_active()
        torch.cuda.reset_peak_memory_stats()
        self._optimizer_step()
        self.held["optimizer"] = torch.cuda.max_memory_allocated()
        self.held["peak"] = max(backward, self.held["optimizer"])
        self.held["reserved"] = max(reserved, torch.cuda.max_memory_reserved())
        self.held["active"] = max(active, max_memory_active())


def train(args: argparse.Namespace) -> Json:
    """Train with one implementation; return memory, calls and time."""
    row = ROWS[args.row]
    trainer = Trainer(args.worker, row)
    for _ in range(NUM_WARMUP):
        trainer.step()
    trainer.watched_step()
    held = trainer.held
    set_behind(True)
    torch.cuda.empty_cache()
    for _ in range(NUM_WARMUP):
        trainer.step()
    trainer.watched_step()
    held["late_peak"] = trainer.held["active"]
    held["late_reserved"] = trainer.held["reserved"]
    set_behind(False)
    trainer.step()  # the device comes up to the host
    before = counts()
    trainer.step()
    calls = {name: value - before[name] for name, value in counts().items()}
    times = []
    for _ in range(args.steps):
        begin = time.process_time_ns()  # the host waits for nothing
        trainer.step()
        times.append(time.process_time_ns() - begin)
    return {
        "held": held,
        "calls": calls,
        "step_ms": statistics.median(times) / 1e6,
    }


def main() -> None:
    """Be rank 0, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", required=True)
    parser.add_argument("--row", choices=list(ROWS), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--worker-folder", type=Path, required=True)
    args = parser.parse_args()
    nbytes = BARE_NBYTES if args.worker == BARE else DEVICE_NBYTES
    os.environ["FAKE_CUDA_MEMORY"] = str(nbytes)
    torch.set_num_threads(1)
    join_alone(ROWS[args.row].num_ranks)
    try:
        report_result(args, train(args))
    except torch.cuda.OutOfMemoryError as error:
        report_result(args, {"failed": str(error).partition(".")[0]})


if __name__ == "__main__":
    main()
