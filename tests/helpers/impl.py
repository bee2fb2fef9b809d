"""The class under test, and the names that go with it.

`FSDP_C_TEST_IMPL=torch` puts torch's own FSDP1 in its place: a check of the tests
themselves. What torch cannot do is skipped with `needs_fsdp_c(...)`.
"""

import importlib
import os
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

IS_TORCH = os.environ.get("FSDP_C_TEST_IMPL", "fsdp_c") == "torch"

# Any: one of two modules with equal names.
_names: Any = torch_fsdp if IS_TORCH else importlib.import_module("fsdp_c")
FSDP: Any = _names.FullyShardedDataParallel


def _name(name: str) -> Any:
    """Return the public name: fsdp_c's own, or torch's, which it accepts."""
    return getattr(_names, name, getattr(torch_fsdp, name))


BackwardPrefetch: Any = _name("BackwardPrefetch")
CPUOffload: Any = _name("CPUOffload")
FullStateDictConfig: Any = _name("FullStateDictConfig")
MixedPrecision: Any = _name("MixedPrecision")
ShardingStrategy: Any = _name("ShardingStrategy")
StateDictType: Any = _name("StateDictType")


def fsdp_kwargs(**kwargs: Any) -> dict[str, Any]:
    """Return ``kwargs``, with the ``device_id`` that torch needs for CPU."""
    if IS_TORCH:
        kwargs.setdefault("device_id", torch.device("cpu"))
    return kwargs


def fsdp(module: nn.Module, **kwargs: Any) -> Any:
    """Wrap ``module``."""
    return FSDP(module, **fsdp_kwargs(**kwargs))


def fsdp_if_available(module: nn.Module, **kwargs: Any) -> Any:
    """Wrap ``module``; skip the test where this version says it cannot yet."""
    try:
        return fsdp(module, **kwargs)
    except ValueError as error:
        if "not available in this version" not in str(error):
            raise
        pytest.skip(str(error))


def needs_fsdp_c(reason: str) -> None:
    """Skip the test where torch's FSDP stands in."""
    if IS_TORCH:
        pytest.skip(f"torch's FSDP1: {reason}")


def memory_stats(model: nn.Module) -> dict[str, int]:
    """Return fsdp_c.memory_stats; skip the test where torch stands in."""
    needs_fsdp_c("has no memory_stats")
    stats: dict[str, int] = _names.memory_stats(model)
    return stats


def unit_states(model: nn.Module) -> set[str]:
    """Return the states of all units; skip the test where torch stands in."""
    needs_fsdp_c("has no states of units")
    return {each._sharded.unit.state for each in FSDP.fsdp_modules(model)}


def assert_idle(model: nn.Module) -> None:
    """Fail unless every unit is sharded and no unsharded memory is held."""
    assert unit_states(model) == {"SHARDED"}
    assert memory_stats(model)["held_nbytes"] == 0
