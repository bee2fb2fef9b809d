"""csrc/nccl under whole models: the bridge joins every group through it."""

import ctypes
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.distributed import distributed
from helpers.impl import IS_TORCH, fsdp

pytestmark = pytest.mark.skipif(IS_TORCH, reason="PyTorch's FSDP has no bridge")
NUM_UNITS = 3


def num_launches() -> int:
    """Return how many calls of NCCL this process has made."""
    library = ctypes.CDLL(os.environ["FSDP_C_NCCL_LIBRARY"])
    library.sim_nccl_num_launches.restype = ctypes.c_longlong
    return library.sim_nccl_num_launches()


@distributed(world_size=(2, 3), device="sim")
def test_collectives_go_through_nccl(rank: int, world_size: int) -> None:
    from fsdp_c import _native

    model = nn.Sequential(*(fsdp(nn.Linear(8, 8)) for _ in range(NUM_UNITS)))
    sharded = fsdp(model)
    x = torch.randn(2, 8)
    sharded(x).sum().backward()
    assert _native.transport(dist.group.WORLD, torch.device("sim")) == ("nccl", "")
    before = num_launches()
    sharded(x).sum().backward()
    # At least a gather and a reduction of each unit.
    assert num_launches() - before >= 2 * NUM_UNITS
    for norm_type in (2.0, float("inf")):
        before = num_launches()
        sharded.clip_grad_norm_(1.0, norm_type)
        assert num_launches() - before == 1
