"""Traps of no_sync(sharded=True): accumulation of reduced shards.

What a number stands for is in tests/lint/test_traps.py.
"""

import pytest

from helpers.distributed import distributed
from helpers.groups import hybrid_groups
from helpers.impl import (
    CPUOffload,
    assert_idle,
    memory_stats,
    needs_fsdp_c,
)
from helpers.reference import Differential

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def _train(differential: Differential, *, is_mixed: bool) -> None:
    """Run steps of several micro batches; only the last one is outside."""
    model = differential.model
    for num_kept in (1, 3, 0, 2):
        differential.zero_grad()
        for index in range(num_kept):
            with model.no_sync(sharded=not is_mixed or index % 2 == 0):
                differential.forward_backward()
        differential.forward_backward()
        assert_idle(model)
        differential.check()
        differential.clip(0.1)
        differential.step()
        differential.check()


@pytest.mark.trap(10)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=(2, 3))
def test_training(
    rank: int,
    world_size: int,
    strategy: str,
    offloads: bool,
    is_mixed: bool,
    use_orig_params: bool,
) -> None:
    """Equal to no_sync(), also where both kinds are mixed in one step."""
    needs_fsdp_c("has no no_sync(sharded=True)")
    differential = Differential.of_model(
        "uneven",
        strategy=strategy,
        use_orig_params=use_orig_params,
        cpu_offload=CPUOffload(offload_params=offloads),
    )
    _train(differential, is_mixed=is_mixed)


@pytest.mark.trap(14)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
@distributed(world_size=4)
def test_replicas(
    rank: int,
    world_size: int,
    shape: tuple[int, int],
    strategy: str,
    use_orig_params: bool,
) -> None:
    """Replicas are reduced once, in the first backward outside."""
    needs_fsdp_c("has no no_sync(sharded=True)")
    with hybrid_groups(*shape) as groups:
        differential = Differential.of_model(
            "mlp",
            process_group=groups,
            strategy=strategy,
            use_orig_params=use_orig_params,
        )
        _train(differential, is_mixed=False)
        _train(differential, is_mixed=True)
        del differential


@pytest.mark.trap(10)
@distributed(world_size=(2, 3))
def test_no_unsharded_gradient_is_kept(rank: int, world_size: int) -> None:
    """Between its backwards a rank holds nothing but the sharded gradient."""
    needs_fsdp_c("has no no_sync(sharded=True)")
    differential = Differential.of_model("mlp")
    differential.train(2)
    with differential.model.no_sync(sharded=True):
        for _ in range(2):
            before = memory_stats(differential.model)
            differential.forward_backward()
            after = memory_stats(differential.model)
            assert after["held_nbytes"] == 0
            assert after["num_reduces"] - before["num_reduces"] == 4
