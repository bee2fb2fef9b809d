"""HYBRID_SHARD: shards inside a group, replicas across groups, every shape."""

import math

import pytest

from helpers.distributed import run_task
from helpers.groups import hybrid_groups
from helpers.reference import Differential

# See `Differential.run`. Under no_sync(sharded=True) only the shard group reduces; the
# replicas are reduced once, in the first backward outside.
SCHEDULES = ("zsu zsu znsu nsu", "zpsu zpppsku zsu zppsku", "zpsu zpnpsku zsu zpnsku")
# Replicas of one rank, one replica only, and both groups larger than one. With an odd
# number of ranks the mean is no power of two.
SHAPES = [(1, 2), (3, 1), (1, 3), (4, 1), (2, 2)]


def _train(shape: tuple[int, int], strategy: str, use_orig_params: bool) -> None:
    with hybrid_groups(*shape) as groups:
        differential = Differential.of_model(
            "mlp",
            process_group=groups,
            strategy=strategy,
            use_orig_params=use_orig_params,
        )
        for schedule in SCHEDULES:
            differential.run(schedule)
        del differential


@pytest.mark.trap(13)
@pytest.mark.trap(14)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_training(shape: tuple[int, int], strategy: str, use_orig_params: bool) -> None:
    """Synced, and with both kinds of no_sync."""
    arguments = {
        "shape": shape,
        "strategy": strategy,
        "use_orig_params": use_orig_params,
    }
    run_task(_train, math.prod(shape), arguments)
