"""The class under test, the names that go with it, and what its engine says."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_c
from fsdp_c import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    memory_stats,
)
from fsdp_c._fully_shard.group import groups_in

__all__ = [
    "FSDP",
    "BackwardPrefetch",
    "CPUOffload",
    "FullStateDictConfig",
    "MixedPrecision",
    "ShardingStrategy",
    "StateDictType",
    "assert_idle",
    "fsdp",
    "memory_stats",
    "unit_states",
]

# Any: tests reach for what it keeps to itself.
FSDP: Any = fsdp_c.FullyShardedDataParallel


def fsdp(
    module: nn.Module,
    *,
    units: Iterable[type[nn.Module]] = (),
    strategy: str | None = None,
    **kwargs: Any,
) -> Any:
    """Wrap ``module``, and in it the modules of the classes ``units``."""
    if units:
        kwargs["auto_wrap_policy"] = ModuleWrapPolicy(set(units))
    if strategy is not None:
        kwargs["sharding_strategy"] = ShardingStrategy[strategy]
    return FSDP(module, **kwargs)


def unit_states(model: nn.Module) -> set[str]:
    """Return the states of all units, of either API."""
    units = [each._sharded.unit for each in FSDP.fsdp_modules(model)]
    units += [group.unit for group in groups_in(model)]
    return {unit.state for unit in units if unit is not None}


def assert_idle(model: nn.Module) -> None:
    """Fail unless every unit is sharded and no unsharded memory is held."""
    assert unit_states(model) == {"SHARDED"}
    assert memory_stats(model)["held_nbytes"] == 0
