"""HYBRID_SHARD: shards inside a group, replicas across groups, every shape."""

import pytest

from helpers.distributed import distributed
from helpers.groups import hybrid_groups
from helpers.reference import Differential


def _check(shape: tuple[int, int], strategy: str, use_orig_params: bool) -> None:
    with hybrid_groups(*shape) as groups:
        differential = Differential.of_model(
            "mlp",
            process_group=groups,
            strategy=strategy,
            use_orig_params=use_orig_params,
        )
        differential.train(2)
        differential.zero_grad()
        differential.accumulate(2, no_sync=True)
        differential.check()
        differential.step()
        differential.check()
        del differential


@pytest.mark.trap(14)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@distributed(world_size=2)
def test_two_ranks(
    shape: tuple[int, int], strategy: str, use_orig_params: bool
) -> None:
    """Replicas of one rank, and one replica only."""
    _check(shape, strategy, use_orig_params)


@pytest.mark.trap(13)
@pytest.mark.trap(14)
@pytest.mark.parametrize("shape", [(3, 1), (1, 3)])
@distributed(world_size=3)
def test_three_ranks(shape: tuple[int, int]) -> None:
    """An odd number, so that the mean is no power of two."""
    _check(shape, "HYBRID_SHARD", True)


@pytest.mark.trap(14)
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)])
@distributed(world_size=4)
def test_four_ranks(shape: tuple[int, int]) -> None:
    """Both groups larger than one. The comparison needs whole parameters."""
    _check(shape, "HYBRID_SHARD", use_orig_params=False)
