"""Warns when something still uses parameters that sharded ones stand for.

An optimizer that was made before ``fully_shard()``, or before a
FullyShardedDataParallel with flat parameters, steps tensors that get no gradient: it
trains nothing, without a word. So does one that was made while modules had whole
parameters: between a forward that keeps them and its backward, or after ``unshard()``.
A module that keeps parameters in a list of its own, or shares them from outside,
computes with the old ones.
"""

import functools
import warnings
import weakref
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fsdp_c._torch_compat import interpreted_with_callees
from fsdp_c._units.uses import mark_replaced, replaced_name

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


def replace_for_good(param: nn.Parameter, name: str) -> None:
    """Note that ``param`` is no longer the model's ``name``, and not computed with.

    The first gradient that comes to it is warned about.
    """
    mark_replaced(param, name)
    if not param.requires_grad:
        return

    def warn(_: nn.Parameter) -> None:
        handle.remove()
        warnings.warn(
            f"a gradient came to the old parameter {name!r}, which fully_shard() "
            "replaced: something computes with its old values, and no step changes "
            "them. Look parameters up in their modules when they are used, instead of "
            "in a list that was made before; call fully_shard() on a module that "
            "contains all that share it",
            stacklevel=2,
        )

    handle = param.register_post_accumulate_grad_hook(warn)  # type: ignore[no-untyped-call]
