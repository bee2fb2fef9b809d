"""FullyShardedDataParallel over parameters that are DTensors of a tensor mesh."""

import functools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy

from helpers.distributed import distributed
from helpers.groups import groups_destroyed
from helpers.tensor_parallel import ParallelFlat, ParallelModel

pytestmark = pytest.mark.cpu_only("tensor parallelism has run on the CPU only")


def adamw(params: Any) -> torch.optim.Optimizer:
    """Return AdamW without weight decay, as flat parameters have padding."""
    return torch.optim.AdamW(params, lr=0.01)


def check_training(num_dp: int, num_tp: int, hidden: int, **options: Any) -> None:
    """Train a model over the mesh and the unsharded one, with clipping."""
    with groups_destroyed():
        both = ParallelFlat(
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
            both.check()
            both.step()
            both.check()
        both.evaluate()
        both.zero_grad()
        both.accumulate(2, no_sync=True)
        both.check()
        both.clip(0.01, float("inf"))


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("hidden", [10, 7])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=4)
def test_training(
    rank: int, world_size: int, use_orig_params: bool, hidden: int, strategy: str
) -> None:
    """2 x 2, with parts of equal and of different sizes."""
    check_training(
        2,
        2,
        hidden,
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
    )


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_one_rank_in_a_dimension(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    """1 x 2 and 2 x 1."""
    check_training(1, 2, 7, use_orig_params=use_orig_params)
    check_training(2, 1, 7, use_orig_params=use_orig_params)
