"""clip_grad_norm_: the checks before the native one."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from fsdp_c._engines.engine import ensure_engine
from fsdp_c._engines.optimizer_in_backward import (
    adopt_in_backward_optimizers,
    check_no_optimizer,
)
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.params import unsharded_params


def clip_grad_norm(module: ShardedModule, max_norm: Any, norm_type: Any) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``.

    See ``FullyShardedDataParallel.clip_grad_norm_``.
    """
    try:
        limit, power = float(max_norm), float(norm_type)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "max_norm and norm_type must be numbers, got "
            f"{max_norm!r} and {norm_type!r}"
        ) from error
    if not power > 0:
        raise ValueError(
            f"norm_type must be > 0 or infinity, got {norm_type!r}: 2.0 is usual"
        )
    if math.isnan(limit):
        raise ValueError(f"max_norm must be a number, got {max_norm!r}")
    for each in sharded_modules(module):
        each._sharded.originals.check()
        adopt_in_backward_optimizers(each)
    check_no_optimizer(module, "clip_grad_norm_()")
    _warn_without_gradients(module)
    others = [
        param
        for _, param in unsharded_params(module, frozenset())
        if param.grad is not None
    ]
    with torch.no_grad():
        return ensure_engine(module).clip_grad_norm(others, limit, power)


def _warn_without_gradients(module: ShardedModule) -> None:
    held = [p for p in module.parameters() if p.requires_grad and p.numel() > 0]
    if held and all(param.grad is None for param in held):
        warnings.warn(
            f"clip_grad_norm_() was called on rank {module.rank} with no gradients -- "
            f"returning the total norm in the default dtype {torch.float32}: call it "
            "after backward",
            stacklevel=4,
        )
