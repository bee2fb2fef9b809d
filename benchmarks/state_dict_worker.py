"""One rank of the state-dict benchmark: make a model with state, convert it, save."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import Json, joined_group, report_result
from implementations import (
    FSDP1_FLAT,
    FSDP1_ORIG,
    FSDP2,
    FSDP_C_FLAT,
    FSDP_C_FULLY,
    FSDP_C_ORIG,
    NUM_BYTES,
    parallelise,
)
from memory_trace import MemoryTrace, storages
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)

from fsdp_c import checkpoint
from fsdp_c.tools.bench._workload import Transformer

NUM_RANKS = 2
DISK = "disk"
MEMCPY = "memcpy"
WIDTHS = {"50M": 512, "200M": 1024}
NUM_BLOCKS = 16
CHUNK_NBYTES = 2**26  # of the plain writes and reads that stand for the disk

FULL_MODEL = "full state dict"
LOAD_FULL = "load a full state dict"
SHARDED_MODEL = "sharded state dict"
LOAD_SHARDED = "load a sharded state dict"
FULL_OPTIM = "full optimizer state dict"
SAVE = "save"
LOAD = "load"
OPERATIONS = [
    FULL_MODEL,
    LOAD_FULL,
    SHARDED_MODEL,
    LOAD_SHARDED,
    FULL_OPTIM,
    SAVE,
    LOAD,
]


def create_model(size: str) -> Transformer:
    """Return the same initial model on every rank and for every implementation."""
    torch.manual_seed(0)
    width = WIDTHS[size]
    return Transformer(width, NUM_BLOCKS, width // 64, NUM_BYTES)


def num_params(size: str) -> int:
    """Return how many elements the parameters of a model have."""
    with torch.device("meta"):
        return sum(param.numel() for param in create_model(size).parameters())


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, ShardedTensor):
        yield from (shard.tensor for shard in value.local_shards())
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


class _Clock:
    """Times operations that all ranks run together, and what memory they need."""

    def __init__(self, num_times: int) -> None:
        self._num_times = num_times
        self._trace = MemoryTrace()
        self.rows: Json = {}

    def time(
        self,
        name: str,
        operation: Callable[[], Any],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Run ``operation`` some times; keep the median of the slowest rank's times.

        ``extra`` is what was live at the peak above what lived before and what the
        result itself takes, in bytes, on the rank that needs most.
        """
        times = []
        result_nbytes = 0
        for index in range(self._num_times + 1):
            prepare()
            dist.barrier()
            self._trace.begin(name if index > 0 else "warm-up")
            # As timeit does: a collection of all that was imported takes 0.2 s, and
            # comes in some operations and not in others.
            gc.disable()
            begin = time.perf_counter()
            result = operation()
            seconds = torch.tensor(time.perf_counter() - begin)
            gc.enable()
            result_nbytes = sum(storages(_tensors(result)).values())
            self._trace.begin("between")
            del result
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if index > 0:
                times.append(seconds.item())
        self.rows[name] = {
            "seconds": statistics.median(times),
            "result": result_nbytes,
        }

    def finish(self) -> None:
        """Add the memory of each operation, of the rank that needs most."""
        peaks = self._trace.peaks()
        for name, row in self.rows.items():
            peak = peaks[name]
            # A result that shares the parameters' memory needs none.
            needed = peak.nbytes - max(peak.at_begin) - row["result"]
            extra = torch.tensor(max(0, needed))
            dist.all_reduce(extra, dist.ReduceOp.MAX)
            row["extra"] = int(extra)


def _empty(folder: Path) -> Callable[[], None]:
    """Return what makes ``folder`` empty, once for all ranks."""

    def prepare() -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        folder.mkdir(parents=True, exist_ok=True)

    return prepare


def _time_full(clock: _Clock, model: Any, optim: torch.optim.Optimizer) -> None:
    """Time what FSDP1's users call: everything, saved on rank 0, loaded on all."""
    kind = type(model)
    configs = (
        FullStateDictConfig(rank0_only=True),
        FullOptimStateDictConfig(rank0_only=True),
    )
    with kind.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        clock.time(FULL_MODEL, model.state_dict)
        clock.time(FULL_OPTIM, lambda: kind.optim_state_dict(model, optim))
    with kind.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        _time_load(clock, LOAD_FULL, model)
    with kind.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        clock.time(SHARDED_MODEL, model.state_dict)
        _time_load(clock, LOAD_SHARDED, model)


def _time_full_by_rows(
    clock: _Clock, model: nn.Module, optim: torch.optim.Optimizer
) -> None:
    """Time the same with what fully_shard's users call."""
    whole = StateDictOptions(full_state_dict=True)
    on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    clock.time(FULL_MODEL, lambda: get_model_state_dict(model, options=on_rank_0))
    clock.time(
        FULL_OPTIM, lambda: get_optimizer_state_dict(model, optim, options=on_rank_0)
    )
    state = get_model_state_dict(model, options=whole)
    clock.time(
        LOAD_FULL, lambda: set_model_state_dict(model, state, options=whole) and None
    )
    clock.time(SHARDED_MODEL, lambda: get_model_state_dict(model))
    _time_load(clock, LOAD_SHARDED, model)


def _time_load(clock: _Clock, name: str, model: nn.Module) -> None:
    state = model.state_dict()
    clock.time(name, lambda: model.load_state_dict(state) and None)


def _time_memcpy(clock: _Clock, size: str) -> None:
    """Time plain copies of the bytes that a rank gets, into fresh memory."""
    numel = num_params(size)
    whole = torch.rand(numel)
    state = torch.rand(2, numel)  # AdamW's
    is_first = dist.get_rank() == 0
    clock.time(FULL_MODEL, lambda: whole.clone() if is_first else None)
    shard = whole[: numel // NUM_RANKS]
    for name in (LOAD_FULL, SHARDED_MODEL, LOAD_SHARDED):
        clock.time(name, shard.clone)
    clock.time(FULL_OPTIM, lambda: state.clone() if is_first else None)


def _time_native(
    clock: _Clock, model: Any, optim: torch.optim.Optimizer, folder: Path
) -> None:
    """Time fsdp_c.checkpoint."""
    path = folder / "checkpoint"
    clock.time(SAVE, lambda: checkpoint.save(path, model, optim), _empty(folder))
    clock.time(LOAD, lambda: checkpoint.load(path, model, optim) and None)


def _time_dcp(
    clock: _Clock, model: Any, optim: torch.optim.Optimizer, folder: Path
) -> None:
    """Time torch.distributed.checkpoint, with the state dicts that it needs."""

    def states() -> dict[str, Any]:
        model_state, optim_state = get_state_dict(model, optim)
        return {"model": model_state, "optim": optim_state}

    def load() -> None:
        state = states()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model,
            optim,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )

    clock.time(
        SAVE, lambda: dcp.save(states(), checkpoint_id=folder) and None, _empty(folder)
    )
    clock.time(LOAD, load)


def _time_disk(clock: _Clock, size: str, folder: Path) -> None:
    """Time plain writes and reads of as many bytes: parameters and AdamW's two."""
    num_chunks = -(-3 * 4 * num_params(size) // NUM_RANKS // CHUNK_NBYTES)
    data = torch.rand(CHUNK_NBYTES // 4).numpy().tobytes()
    path = folder / f"rank{dist.get_rank()}"

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(num_chunks):
                file.write(data)
            os.fsync(file.fileno())

    buffer = bytearray(CHUNK_NBYTES)

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    clock.time(SAVE, write, _empty(folder))
    clock.time(LOAD, read)


def run(args: argparse.Namespace) -> None:
    """Join the other rank, time one implementation, and report."""
    with joined_group(args):
        clock = _Clock(args.steps)
        folder: Path = args.folder / "files"
        if args.worker == DISK:
            _time_disk(clock, args.size, folder)
        elif args.worker == MEMCPY:
            _time_memcpy(clock, args.size)
        else:
            _time_model(clock, args, folder)
        clock.finish()
        report_result(args, {"operations": clock.rows})


def _time_model(clock: _Clock, args: argparse.Namespace, folder: Path) -> None:
    """Time what there is of one implementation, after a step of AdamW."""
    model: nn.Module = parallelise(create_model(args.size), args.worker)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    tokens = torch.randint(NUM_BYTES, (1, 2))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optim.step()
    optim.zero_grad()
    if args.worker in (FSDP2, FSDP_C_FULLY):
        _time_full_by_rows(clock, model, optim)
    else:
        _time_full(clock, model, optim)
    if args.worker in (FSDP_C_ORIG, FSDP_C_FLAT, FSDP_C_FULLY):
        _time_native(clock, model, optim, folder)
    elif args.worker in (FSDP1_ORIG, FSDP2):
        _time_dcp(clock, model, optim, folder)
    else:
        assert args.worker == FSDP1_FLAT
