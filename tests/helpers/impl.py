"""The class under test, the names that go with it, and what its engine says."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
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
from helpers.models import CASES

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
    "wrap_case",
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


def wrap_case(impl: str, name: str, seed: int = 0, **kwargs: Any) -> Any:
    """Wrap the model of a case by fsdp_c, or on the CPU by "torch"."""
    torch.manual_seed(seed)
    module, units = CASES[name].build(), CASES[name].unit_classes
    if impl != "torch":
        return fsdp(module, units=units, **kwargs)
    kwargs["auto_wrap_policy"] = ModuleWrapPolicy(units)
    return TorchFSDP(module, device_id=torch.device("cpu"), **kwargs)


def unit_states(model: nn.Module) -> set[str]:
    """Return the states of all units, of either API."""
    units = [each._sharded.unit for each in FSDP.fsdp_modules(model)]
    units += [group.unit for group in groups_in(model)]
    return {unit.state for unit in units if unit is not None}


def assert_idle(model: nn.Module) -> None:
    """Fail unless every unit is sharded and no unsharded memory is held."""
    assert unit_states(model) == {"SHARDED"}
    assert memory_stats(model)["held_nbytes"] == 0
