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
