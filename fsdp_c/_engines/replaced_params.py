"""Warns when an optimizer has parameters that sharded ones stand for.

One that was made before ``fully_shard()``, or before a FullyShardedDataParallel with
flat parameters, steps tensors that get no gradient: it trains nothing, without a word.
So does one that was made while modules had whole parameters: between a forward that
keeps them and its backward, or after ``unshard()``.
"""

import functools
import warnings
import weakref
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fsdp_c._torch_compat import interpreted_with_callees
from fsdp_c._units.uses import replaced_name

_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@functools.cache
def watch_optimizers() -> None:
    """Look at each optimizer of the process once, after its first step.

    Not before: one that follows the model takes its new parameters in the step.
    """
    register_optimizer_step_post_hook(_look_once)


@interpreted_with_callees
def _look_once(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    replaced = [name for name in map(replaced_name, params) if name is not None]
    if not replaced:
        return
    warnings.warn(
        f"{type(optimizer).__name__} steps {len(replaced)} of {len(params)} "
        f"parameters, the first of them {replaced[0]!r}, that are no longer the "
        "model's: it was made before the model was sharded, or while its modules had "
        "whole parameters (between forward and backward, after unshard()), and does "
        "not train them. Make it afterwards, of model.parameters(). "
        "FullyShardedDataParallel with use_orig_params=True keeps the parameters of an "
        "earlier optimizer",
        stacklevel=3,
    )
