"""Peak memory of saving, loading, exporting: a few MiB, whatever the model's size."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_c import checkpoint
from helpers.distributed import distributed
from helpers.impl import fsdp

MIB = 1 << 20
NUMEL = 8 * MIB  # 32 MiB, and 64 MiB of optimizer state


def _peak_nbytes(call: Callable[[], Any]) -> int:
    """Return by how much the process grew meanwhile, at most."""

    def status(key: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise AssertionError(key)

    # What was freed, here or by tests before, does not hide what is new: every large
    # block is mapped (M_MMAP_THRESHOLD is -3), small ones are given back.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


@pytest.mark.cpu_only("memory of the process, of which the device's is a part there")
@pytest.mark.parametrize(
    "use_orig_params", [True, pytest.param(False, marks=pytest.mark.only_full)]
)
@distributed(world_size=2, timeout_s=120.0)
def test_peaks(
    rank: int, world_size: int, tmp_path: Path, use_orig_params: bool
) -> None:
    model = fsdp(
        nn.Linear(NUMEL // 4096, 4096, bias=False), use_orig_params=use_orig_params
    )
    optim = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optim.step()
    optim.zero_grad()
    checkpoint.save(tmp_path / "warm", model, optim)

    path = tmp_path / "c"
    part = 4 * NUMEL // world_size
    assert _peak_nbytes(lambda: checkpoint.save(path, model, optim)) < 8 * MIB
    assert _peak_nbytes(lambda: checkpoint.load(path, model)) < 8 * MIB
    assert _peak_nbytes(lambda: checkpoint.load(path, model, optim)) < 8 * MIB
    fresh = torch.optim.AdamW(model.parameters())
    grown = _peak_nbytes(lambda: checkpoint.load(path, model, fresh))
    assert 2 * part < grown < 2 * part + 8 * MIB  # its state
    fresh.state.clear()
    handle = []
    save = lambda: handle.append(  # noqa: E731
        checkpoint.save(path, model, optim, blocking=False)
    )
    grown = _peak_nbytes(save)
    assert 2 * part < grown < 3 * part + 8 * MIB  # the copy on the host
    handle[0].result()
    if rank == 0:
        grown = _peak_nbytes(lambda: checkpoint.export(path, tmp_path / "hf"))
        assert grown < 50 * MIB
        assert _peak_nbytes(lambda: checkpoint.verify(path)) < 8 * MIB
    dist.barrier()
    assert (
        _peak_nbytes(lambda: checkpoint.import_safetensors(tmp_path / "hf", model))
        < 8 * MIB
    )
