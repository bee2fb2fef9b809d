"""Local optimizer state dicts: each rank's own state as it is.

Keys are the clean names of what the optimizer steps. They fit the same number of
ranks and wrapping only, cost no communication, and keep state of any kind.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_c._state.optim.classes import cloned, rewrapped, special_tensor
from fsdp_c._state.optim.keys import Key, keys_of_optimizer, renamed, uses_names
from fsdp_c._state.optim.states import collect
from fsdp_c._units.keep_whole import keeps_blocks
from fsdp_c._units.names import clean_name

# A top-level entry: the elements that the rank holds, by parameter.
LOCAL_PARTS = "local_parts"


def save_local(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    *,
    offload_to_cpu: bool,
    state_dict: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return this rank's optimizer state as it is, by names of ``parameters()``.

    With use_orig_params=False those are names of flat parameters. Nothing is
    communicated. The tensors own their memory.
    """
    if state_dict is None:
        state_dict = optim.state_dict()
    parts = _parts(model, optim, state_dict)
    names = _names(model, optim, is_named=uses_names(state_dict))
    device = "cpu" if offload_to_cpu else None
    return {
        **renamed(
            state_dict,
            lambda key: names.get(key, key),
            names.__getitem__,
            lambda state: _copied(state, device),
        ),
        LOCAL_PARTS: parts,
    }


def _copied(state: Any, device: str | None) -> Any:
    """Return a copy of a parameter's state, or of state that is of none."""
    if isinstance(state, Mapping):
        return {name: _copied_value(value, device) for name, value in state.items()}
    return _copied_value(state, device)


def _copied_value(value: Any, device: str | None) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    place, special = device or value.device, special_tensor(value)
    if special is None:
        return value.detach().to(place, copy=True)
    return rewrapped(value, cloned(special).to(place))


def _names(
    model: nn.Module, optim: torch.optim.Optimizer, *, is_named: bool
) -> dict[Key, Key]:
    """Return the names of what the optimizer steps, without wrappers, by its keys."""
    names = {param: clean_name(name) for name, param in model.named_parameters()}
    keys = keys_of_optimizer(model, optim, is_named=is_named)
    return {key: names[param] for key, param in keys.param_of_key.items()}


def _parts(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """Return ``[begin, end, numel]`` of this rank's part of each parameter.

    Within a flat parameter whose order keep_whole() changed, then its offset.
    """
    states = collect(model, optim, state_dict=state_dict).states
    parts = {}
    for name, state in states.items():
        part, module = state.part, state.part.module
        parts[name] = [part.begin, part.end, part.shape.numel()]
        if part.is_flat and module is not None:
            sharded = module._sharded
            if keeps_blocks(sharded.uses, sharded.groups.num_shards):
                parts[name].append(part.home.offset)
    return parts


def load_local(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    *,
    is_named: bool,
) -> dict[str, Any]:
    """Return what ``optim.load_state_dict`` takes, of a local state dict.

    Nothing is communicated. It must be of the same parts: rank, number of ranks and
    wrapping.
    """
    if not isinstance(state_dict, Mapping) or LOCAL_PARTS not in state_dict:
        raise ValueError(
            "this is no local optimizer state dict: set the StateDictType that it was "
            "saved with"
        )
    parts = _parts(model, optim)
    given = state_dict[LOCAL_PARTS]
    for name in sorted(parts.keys() | given.keys()):
        if list(given.get(name, ())) != parts.get(name):
            raise ValueError(
                f"this local optimizer state dict has {_part(given.get(name))} of "
                f"parameter {name!r}, and this rank holds {_part(parts.get(name))}: "
                "load it with the same number of ranks and wrapping, on the rank that "
                "saved it; full and sharded state dicts fit any"
            )
    names = _names(model, optim, is_named=is_named)
    keys = {name: key for key, name in names.items()}

    def key_of(name: Key) -> Key:
        if name not in keys:
            raise ValueError(
                f"parameter {name!r} of the local optimizer state dict is not "
                "one that the optimizer steps under this name: set the same "
                "use_orig_params"
            )
        return keys[name]

    return renamed(
        state_dict,
        lambda name: keys.get(name, name),
        key_of,
        lambda state: _copied(state, None),
    )


def _part(part: list[int] | None) -> str:
    if part is None:
        return "nothing"
    begin, end, numel, *offset = part
    place = f" at {offset[0]} of its shard" if offset else ""
    return f"elements {begin} to {end} of {numel}{place}"
