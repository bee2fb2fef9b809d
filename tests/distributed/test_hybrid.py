"""HYBRID_SHARD: shards inside a group, replicas across groups, every shape."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers.distributed import distributed
from helpers.impl import ShardingStrategy, fsdp, needs_fsdp_c
from helpers.models import CASES, Block, vectors
from helpers.reference import Differential


def _groups(
    rank: int, num_replicas: int, num_shards: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's shard group and replica group; all ranks make all."""
    shard_group = replica_group = None
    for replica in range(num_replicas):
        ranks = [replica * num_shards + shard for shard in range(num_shards)]
        group = dist.new_group(ranks)
        if rank in ranks:
            shard_group = group
    for shard in range(num_shards):
        ranks = [replica * num_shards + shard for replica in range(num_replicas)]
        group = dist.new_group(ranks)
        if rank in ranks:
            replica_group = group
    assert shard_group is not None
    assert replica_group is not None
    return shard_group, replica_group


def _check(rank: int, shape: tuple[int, int], strategy: str, use_orig: bool) -> None:
    needs_fsdp_c("does not average over the replicas of an (n, 1) mesh")
    groups = _groups(rank, *shape)
    try:
        _train(groups, strategy, use_orig)
    finally:
        for group in groups:
            dist.destroy_process_group(group)


def _train(groups: Any, strategy: str, use_orig: bool) -> None:
    def wrap(model: Any) -> Any:
        return fsdp(
            model,
            process_group=groups,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig,
        )

    differential = Differential(
        CASES["mlp"].build, wrap, vectors, use_orig_params=use_orig
    )
    differential.train(2)
    differential.zero_grad()
    differential.accumulate(2, no_sync=True)
    differential.check()
    differential.step()
    differential.check()


@pytest.mark.trap(14)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@distributed(world_size=2)
def test_two_ranks(
    rank: int,
    world_size: int,
    shape: tuple[int, int],
    strategy: str,
    use_orig_params: bool,
) -> None:
    """Replicas of one rank, and one replica only."""
    _check(rank, shape, strategy, use_orig_params)


@pytest.mark.trap(13)
@pytest.mark.trap(14)
@pytest.mark.parametrize("shape", [(3, 1), (1, 3)])
@distributed(world_size=3)
def test_three_ranks(rank: int, world_size: int, shape: tuple[int, int]) -> None:
    """An odd number, so that the mean is no power of two."""
    _check(rank, shape, "HYBRID_SHARD", True)


@pytest.mark.trap(14)
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)])
@distributed(world_size=4)
def test_four_ranks(rank: int, world_size: int, shape: tuple[int, int]) -> None:
    """Both groups larger than one. The comparison needs whole parameters."""
    _check(rank, shape, "HYBRID_SHARD", use_orig=False)
