"""torch's FSDP1 methods run fsdp_c's for a model that fsdp_c wrapped.

Programs, torch.distributed.checkpoint and frameworks call
``torch.distributed.fsdp.FullyShardedDataParallel.state_dict_type(model, ...)``. Each
method of torch's class that takes a model is replaced by one that looks at the model:

* with modules of fsdp_c, fsdp_c's method runs;
* with modules of torch's FSDP1, or of neither, torch's method runs;
* with both, it is an error: neither can save or step the other's units.

The methods are replaced when fsdp_c wraps its first module, not at import.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn

from fsdp_c._state.optim.torch_state_dicts import (
    make_first_states_together,
    show_names_of_flat_states,
)
from fsdp_c._torch_compat import TorchFSDP, checkpoint_state_dict
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.names import FLAT_PARAM
from fsdp_c._units.originals import FlatParameter

# Methods that some programs call as TorchFSDP.clip_grad_norm_(model, 1.0).
_OF_INSTANCES = (
    "apply",
    "check_is_root",
    "clip_grad_norm_",
    "no_sync",
    "register_comm_hook",
)
_EXTRA_STATE = "_extra_state"
_MODEL_ARGUMENTS = ("module", "model", "self")

_applied: set[str] = set()


def begin(ours: type[ShardedModule], module: object) -> None:
    """Replace torch's methods by dispatchers to ``ours``, before it wraps ``module``.

    Refuse a ``module`` with modules of torch's own FSDP1 in it.
    """
    if isinstance(module, nn.Module) and torch_modules(module):
        raise ValueError(mixed(type(module).__name__, "fsdp_c"))
    if _applied:
        return
    for name, value in list(vars(TorchFSDP).items()):
        is_static = isinstance(value, staticmethod)
        function = value.__func__ if is_static else value
        if name in _OF_INSTANCES or is_static:
            new = _dispatching(name, function, ours)
            if new is not None:
                setattr(TorchFSDP, name, staticmethod(new) if is_static else new)
                _applied.add(name)
    _refuse_to_wrap_ours()
    _name_what_units_hold()
    _leave_frozen_params_out()
    show_names_of_flat_states()
    make_first_states_together()


def torch_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules in ``module`` that torch's own FSDP1 wraps."""
    return [
        each
        for each in module.modules()
        if isinstance(each, TorchFSDP) and not isinstance(each, ShardedModule)
    ]


def is_ours(module: object, method: str) -> bool:
    """Return whether modules of fsdp_c are in ``module``; refuse those of both."""
    if not isinstance(module, nn.Module):
        return False
    first = next(sharded_modules(module), None)
    if first is None:
        return False
    if torch_modules(module):
        raise ValueError(mixed(first._sharded.name, method))
    return True


def mixed(unit: str, what: str) -> str:
    """Return the message about a tree of both classes."""
    return (
        f"{what}: the model holds modules of torch's FullyShardedDataParallel and of "
        f"fsdp_c's (unit {unit!r}), and neither can gather, reduce or save the other's "
        "units: wrap the whole model with one of them"
    )


def _dispatching(
    name: str, original: Callable[..., Any], ours: type[ShardedModule]
) -> Callable[..., Any] | None:
    """Return ``original``, or for models of fsdp_c the method of ``ours``.

    None if it takes no model.
    """
    names = list(inspect.signature(original).parameters)
    index, keyword = next(
        ((i, each) for i, each in enumerate(names) if each in _MODEL_ARGUMENTS),
        (None, ""),
    )
    if index is None:
        return None
    own = getattr(ours, name)

    @functools.wraps(original)
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        module = args[index] if len(args) > index else kwargs.get(keyword)
        function = own if is_ours(module, name) else original
        return function(*args, **kwargs)

    return dispatched


def _refuse_to_wrap_ours() -> None:
    """Let torch's class refuse to wrap a model that fsdp_c has wrapped."""
    original = TorchFSDP.__init__

    @functools.wraps(original)
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, nn.Module):
            first = next(sharded_modules(module), None)
            if first is not None:
                raise ValueError(
                    mixed(first._sharded.name, "torch's FullyShardedDataParallel")
                )
        original(self, module, *args, **kwargs)

    TorchFSDP.__init__ = init  # type: ignore[method-assign]


def _name_what_units_hold() -> None:
    """Let torch.distributed.checkpoint.state_dict name what the module of a unit holds.

    It knows one flat parameter a unit, under the name ``_flat_param``; a unit of ours
    has one per segment. It takes extra state for an attribute of the module.
    """
    checkpoint = checkpoint_state_dict()
    original = checkpoint._get_fqns

    @functools.wraps(original)
    def get_fqns(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> set[str]:
        path, _, last = name.rpartition(".")
        found: object = None
        if path and last.startswith(FLAT_PARAM):
            with suppress(AttributeError):
                found = model.get_parameter(name)
        if isinstance(found, FlatParameter):
            held = list(found._fqns)
        elif path and last == _EXTRA_STATE:
            held = [last]
        else:
            names: set[str] = original(model, name, *args, **kwargs)
            return names
        # Its own rules for the prefix; every module has this attribute.
        (stand_in,) = original(model, f"{path}.training", *args, **kwargs)
        prefix = stand_in.removesuffix("training")
        return {f"{prefix}{fqn}" for fqn in held}

    checkpoint._get_fqns = get_fqns


def _leave_frozen_params_out() -> None:
    """Let ``ignore_frozen_params`` go with a state dict that only rank 0 gets.

    torch.distributed.checkpoint.state_dict drops the frozen parameters on all ranks,
    and raises KeyError where the state dict is empty.
    """
    checkpoint = checkpoint_state_dict()
    original = checkpoint._get_model_state_dict

    @functools.wraps(original)
    def get_model_state_dict(model: nn.Module, info: Any) -> Any:
        if not info.ignore_frozen_params or not is_ours(model, "get_model_state_dict"):
            return original(model, info)
        state = original(model, replace(info, ignore_frozen_params=False))
        for name, param in model.named_parameters():
            for fqn in () if param.requires_grad else checkpoint._get_fqns(model, name):
                state.pop(fqn, None)
        return state

    checkpoint._get_model_state_dict = get_model_state_dict
