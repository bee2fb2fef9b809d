"""What no state dict can hold is refused at an optimizer's first step, not at a save.

Before its first step an optimizer has no state, so nobody knows what it will keep.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fsdp_c._state.optim.classes import (
    describe_state,
    inner_tensors,
    refusal,
    special_tensor,
)
from fsdp_c._units.cuts import has_values
from fsdp_c._units.names import clean_name
from fsdp_c._units.uses import is_taken, sharding_unit


class OptimizerCheck:
    """Looks once at the state of each optimizer of sharded parameters."""

    def __init__(self) -> None:
        self._checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Look at no more."""
        self._handle.remove()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in self._checked or not optimizer.state:
            return
        self._checked.add(optimizer)
        check_states(optimizer)


def check_states(optimizer: torch.optim.Optimizer) -> None:
    """Check that the states of sharded parameters can be saved.

    Raises:
        TypeError: One is of a class that has neither values nor tensors in it.
    """
    number = -1
    for group in optimizer.param_groups:
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            number += 1
            is_rows = isinstance(param, DTensor)
            if not is_rows and not is_taken(param):
                continue
            for key, value in optimizer.state.get(param, {}).items():
                special = special_tensor(value)
                if special is None or has_values(special):
                    continue
                if is_rows and inner_tensors(special):
                    continue  # fsdp_c.checkpoint keeps these
                name = repr(clean_name(names[index])) if names else f"number {number}"
                what = describe_state(optimizer, key, f"{name}{_of_unit(param)}")
                raise TypeError(refusal(what, special))


def _of_unit(param: nn.Parameter) -> str:
    unit = sharding_unit(param)
    return "" if unit is None else f" of unit {unit!r}"
