"""Optimizers step the shards of DTensors, and not DTensors.

Torch computes each operation on DTensors in Python: 0.1 ms per parameter and step of
AdamW with ``foreach=False``, and seconds in the first step with ``foreach=True``. An
optimizer that computes each element by itself needs none of it. Its step runs over a
borrower, an optimizer of the same class that has the other's attributes, and shards in
the place of parameters, gradients and states. States that the step makes are made
DTensors of the optimizer's.

The borrower lives as long as the call, and the optimizer itself is as ever: its hooks,
state dicts and schedulers see DTensors only, and an exception leaves nothing behind.
"""

import functools
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_c import _native
from fsdp_c._torch_compat import local_tensor
from fsdp_c._units.cuts import like_dtensor

_State = dict[str, Any]


class _LentState(dict[str, Any]):
    """The state of a parameter; what is set in it is set in the optimizer's."""

    __slots__ = ("_param", "_state")

    def __init__(self, param: DTensor, state: _State) -> None:
        super().__init__()
        self._param = param
        self._state = state

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if isinstance(value, Tensor) and value.dim() > 0:
            old = self._state.get(name)
            if isinstance(old, DTensor) and local_tensor(old) is value:
                return
            value = like_dtensor(value, self._param)
        self._state[name] = value


class _LentStates(dict[Tensor, _State]):
    """The states by shard; those that do not exist are made in the optimizer, too."""

    __slots__ = ("params", "states")

    def __init__(self, states: dict[Tensor, _State]) -> None:
        super().__init__()
        self.states = states
        self.params: dict[Tensor, DTensor] = {}

    def __missing__(self, shard: Tensor) -> _State:
        param = self.params.get(shard)
        if param is None:
            return self.states[shard]  # it is no DTensor
        state = self[shard] = _LentState(param, self.states[param])
        return state


class _Borrower(optim.Optimizer):
    """Mixed into an optimizer's class."""

    __slots__ = ("_lent_states", "_owner")
    _owner: optim.Optimizer
    _lent_states: dict[Tensor, _State]

    # Read in the step, behind its closure and all hooks, which may set gradients.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        owner = self._owner
        lent = _LentStates(owner.state)
        groups = _native.lend_shards(
            owner.param_groups, owner.state, lent.params, lent, _LentState
        )
        self._lent_states = owner.state if groups is None else lent
        return owner.param_groups if groups is None else groups

    @property
    def state(self) -> dict[Tensor, _State]:  # type: ignore[override]
        return self._lent_states


# Of torch's optimizers that compute each element by itself. Not of their subclasses.
_BORROWERS: dict[type[optim.Optimizer], type[_Borrower]] = {
    kind: type(kind.__name__, (_Borrower, kind), {"__slots__": ()})
    for kind in (
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    )
}


@functools.cache
def lend_to_optimizers() -> None:
    """Lend shards to all optimizers of DTensors from now on."""
    register_optimizer_step_pre_hook(_lend)


def _lend(
    optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a step of shards; None: it steps what it has."""
    kind = _BORROWERS.get(type(optimizer))
    if kind is None or torch.compiler.is_compiling():
        return None
    groups = optimizer.param_groups
    params = (param for group in groups for param in group["params"])
    if not any(isinstance(param, DTensor) for param in params):
        return None
    if any(group.get("differentiable") for group in groups):
        return None
    borrower = object.__new__(kind)
    borrower.__dict__ = optimizer.__dict__
    borrower._owner = optimizer
    borrower._lent_states = optimizer.state
    return (borrower, *args[1:]), kwargs
