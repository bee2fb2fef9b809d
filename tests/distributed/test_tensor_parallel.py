"""fully_shard over parameters that are DTensors of a tensor parallel mesh."""

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_c import fully_shard
from helpers.distributed import distributed
from helpers.groups import groups_destroyed
from helpers.tensor_parallel import (
    ParallelModel,
    ParallelRows,
    parallelize,
    shard_blocks,
    two_meshes,
)

pytestmark = pytest.mark.cpu_only("fully_shard has not run on the simulated device")

MESHES = {(2, 2): 4, (1, 2): 2, (2, 1): 2, (1, 3): 3}


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW with weight decay."""
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def check_training(num_dp: int, num_tp: int, hidden: int, **options: Any) -> None:
    """Train a model over the mesh and the unsharded one, with clipping."""
    with groups_destroyed():
        both = ParallelRows(
            num_dp,
            num_tp,
            build=functools.partial(ParallelModel, hidden=hidden),
            optimizer=adamw,
            **options,
        )
        for _ in range(3):
            both.zero_grad()
            both.forward_backward()
            both.check()
            both.clip(0.1)
            both.step()
            both.check()
        both.evaluate()
        both.zero_grad()
        both.accumulate(2, no_sync=True)
        both.check()


@pytest.mark.parametrize("hidden", [10, 7])
@pytest.mark.parametrize("reshard_after_forward", [None, False])
@distributed(world_size=4)
def test_training(
    rank: int, world_size: int, hidden: int, reshard_after_forward: bool | None
) -> None:
    """2 x 2, with parts of equal and of different sizes."""
    check_training(2, 2, hidden, reshard_after_forward=reshard_after_forward)


@pytest.mark.parametrize("hidden", [10, 7])
@distributed(world_size=2)
def test_one_rank_in_a_dimension(rank: int, world_size: int, hidden: int) -> None:
    """1 x 2 and 2 x 1."""
    check_training(1, 2, hidden)
    check_training(2, 1, hidden)


@distributed(world_size=3)
def test_more_ranks_than_parts(rank: int, world_size: int) -> None:
    """A rank of the tensor parallel group that has nothing of some parameters."""
    check_training(1, 3, 4)
