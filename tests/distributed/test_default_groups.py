"""HYBRID_SHARD without groups, and process groups that are not c10d's."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_c._units.groups import node_groups
from helpers.distributed import distributed
from helpers.impl import FSDP, ShardingStrategy, fsdp
from helpers.models import CASES, Block
from helpers.reference import Differential

pytestmark = pytest.mark.bookkeeping


def _with_local_world_size(value: str | None, body: Callable[[], Any]) -> None:
    """Run ``body``, which returns a wrapped module or None; destroy its groups."""
    with pytest.MonkeyPatch.context() as patch:
        if value is None:
            patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        else:
            patch.setenv("LOCAL_WORLD_SIZE", value)
        model = body()
    if model is not None:
        dist.destroy_process_group(model.process_group)
        dist.destroy_process_group(model._inter_node_pg)


def _wrap(model: nn.Module, strategy: str, use_orig_params: bool) -> Any:
    return fsdp(
        model, strategy=strategy, units={Block}, use_orig_params=use_orig_params
    )


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return sorted(dist.get_process_group_ranks(group))


@pytest.mark.parametrize(
    "per_node",
    [
        # One accelerator is a node of its own.
        pytest.param(None, marks=pytest.mark.cpu_only("a device is a node")),
        1,
        2,
    ],
)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@distributed(world_size=4)
def test_shards_inside_a_node(
    rank: int, strategy: str, use_orig_params: bool, per_node: int | None
) -> None:
    """Replicas across nodes, and the numbers are right.

    So Lightning Fabric wraps: with a policy, and neither groups nor a mesh.
    """

    def body() -> Any:
        differential = Differential.of_case(
            CASES["mlp"],
            lambda model: _wrap(model, strategy, use_orig_params),
            use_orig_params=use_orig_params,
        )
        differential.train(2)
        root = differential.model
        size = per_node or 4
        first = rank - rank % size
        assert _ranks(root.process_group) == list(range(first, first + size))
        assert _ranks(root._inter_node_pg) == list(range(rank % size, 4, size))
        assert (root.world_size, root.rank) == (size, rank % size)
        return root

    _with_local_world_size(per_node and str(per_node), body)


@distributed(world_size=2)
def test_groups_are_made_once() -> None:
    """All units, and all models, share them."""

    def body() -> Any:
        models = [_wrap(CASES["mlp"].build(), "HYBRID_SHARD", True) for _ in range(2)]
        units = [unit for model in models for unit in FSDP.fsdp_modules(model)]
        assert len(units) == 8
        assert len({id(unit.process_group) for unit in units}) == 1
        assert len({id(unit._inter_node_pg) for unit in units}) == 1
        return models[0]

    _with_local_world_size("2", body)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("2", r"got 3 ranks and 2 per node \(LOCAL_WORLD_SIZE\)"),
        ("0", r"LOCAL_WORLD_SIZE='0'"),
        ("many", r"LOCAL_WORLD_SIZE='many'"),
    ],
)
@distributed(world_size=3)
def test_a_size_that_does_not_fit(value: str, message: str) -> None:
    """The message names both numbers, or the word."""

    def body() -> Any:
        with pytest.raises(ValueError, match=message):
            _wrap(CASES["mlp"].build(), "HYBRID_SHARD", True)
        return None

    _with_local_world_size(value, body)


class RankAndSize:
    """As much of a process group as wrapping needs."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 4


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@distributed(world_size=2)
def test_group_with_rank_and_size_only(strategy: str) -> None:
    """Wraps and can be looked at; running it raises."""
    group: Any = RankAndSize()
    module = nn.Linear(8, 4, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.arange(32.0).view(4, 8))
    model = fsdp(module, process_group=group, strategy=strategy, use_orig_params=True)
    assert model.process_group is group
    assert (model.rank, model.world_size) == (1, 4)
    if strategy == "NO_SHARD":
        with pytest.raises(RuntimeError, match="RankAndSize, which cannot communicate"):
            model(torch.ones(1, 8)).sum().backward()
        return
    assert model.weight.tolist() == [float(i) for i in range(8, 16)]
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 8))


@distributed(world_size=2)
def test_group_of_one(rank: int, world_size: int) -> None:
    """Nothing to shard over: NO_SHARD, with FSDP1's warning unless it was asked for."""
    groups = [dist.new_group([r]) for r in range(world_size)]
    group = groups[rank]
    for name in ("FULL_SHARD", "SHARD_GRAD_OP"):
        strategy = ShardingStrategy[name]
        with pytest.warns(UserWarning, match=f"NO_SHARD.*{strategy}.*world size is 1"):
            model = fsdp(
                nn.Linear(3, 3), process_group=group, sharding_strategy=strategy
            )
        assert model.sharding_strategy is ShardingStrategy.NO_SHARD
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fsdp(nn.Linear(3, 3), process_group=group, strategy="NO_SHARD")
    dist.destroy_process_group(group)


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
@distributed(world_size=2)
def test_container_without_forward(container: type[nn.Module]) -> None:
    """Its children would run sharded: a warning says so."""
    module = container()
    module.add_module("0", nn.Linear(3, 3))
    if container is nn.ModuleList:
        with pytest.warns(UserWarning, match="do not implement forward.*ModuleList"):
            fsdp(module)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fsdp(module)


@distributed(world_size=2)
def test_ignored_states() -> None:
    """FSDP1's messages, which scripts may match."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weight = module[0].weight
    for kwargs, part in (
        ({"ignored_modules": [weight]}, "ignored_modules expects nn.Module.*Parameter"),
        ({"ignored_states": [weight, module[1]]}, "ignored_states expects all nn.Para"),
        (
            {"ignored_modules": [module[0]], "ignored_states": [weight]},
            "Cannot pass both ignored_modules and ignored_states",
        ),
    ):
        with pytest.raises(ValueError, match=part):
            fsdp(module, **kwargs)
    with pytest.warns(UserWarning, match="Trying to ignore the top-level module"):
        fsdp(module, ignored_modules=[module])


@distributed(world_size=2)
def test_they_have_the_time_limit_of_the_default_group() -> None:
    """A rank that does not come is noticed then, not after torch's 30 minutes."""
    limit = timedelta(seconds=77)
    default = dist.new_group(timeout=limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        made = node_groups(default)
    for group in made:
        assert group._get_backend(torch.device("cpu")).options._timeout == limit
    for group in (*made, default):
        dist.destroy_process_group(group)
