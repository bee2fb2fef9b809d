"""Local optimizer state dicts: each rank's own state as it is.

Keys are the clean names of what the optimizer steps. They fit the same number of
ranks and wrapping only, cost no communication, and keep state of any kind.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_c._state.optim.keys import keys_of_optimizer, uses_names
from fsdp_c._state.optim.states import OptimStates, collect
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

    Raises:
        ValueError: See :func:`~fsdp_c._state.optim.states.collect`.
    """
    if state_dict is None:
        state_dict = optim.state_dict()
    keys = keys_of_optimizer(model, optim, is_named=uses_names(state_dict))
    local = collect(model, optim, state_dict=state_dict, keys=keys)
    names = _names(model)
    name_of_key = {key: names[param] for key, param in keys.param_of_key.items()}

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        device = torch.device("cpu") if offload_to_cpu else value.device
        return value.detach().to(device, copy=True)

    result: dict[str, Any] = {
        "state": {
            name_of_key.get(key, key): {n: own(v) for n, v in state.items()}
            for key, state in state_dict["state"].items()
        }
    }
    if "param_groups" in state_dict:
        result["param_groups"] = [
            {
                **copy.deepcopy({k: v for k, v in group.items() if k != "params"}),
                "params": [name_of_key[key] for key in group["params"]],
            }
            for group in state_dict["param_groups"]
        ]
    result[LOCAL_PARTS] = _parts(local)
    return result


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the names of the parameters that an optimizer steps, without wrappers."""
    return {param: clean_name(name) for name, param in model.named_parameters()}


def _parts(local: OptimStates) -> dict[str, list[int]]:
    """Return ``[begin, end, numel]`` of this rank's part of each parameter."""
    return {
        name: [state.part.begin, state.part.end, state.part.numel]
        for name, state in local.states.items()
    }


def load_local(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    *,
    is_named: bool,
) -> dict[str, Any]:
    """Return what ``optim.load_state_dict`` takes, of a local state dict.

    Nothing is communicated.

    Raises:
        TypeError: ``state_dict`` is no dictionary.
        ValueError: It is not local, or of other parameters, or of other parts of
            them: another rank, number of ranks, or wrapping.
    """
    if not isinstance(state_dict, Mapping) or LOCAL_PARTS not in state_dict:
        raise ValueError(
            "this is no local optimizer state dict: set the StateDictType that it was "
            "saved with"
        )
    keys = keys_of_optimizer(model, optim, is_named=is_named)
    names = _names(model)
    parts = _parts(collect(model, optim))
    given = state_dict[LOCAL_PARTS]
    for name in sorted(parts.keys() | given.keys()):
        if list(given.get(name, ())) != parts.get(name):
            raise ValueError(
                f"this local optimizer state dict has {_part(given.get(name))} of "
                f"parameter {name!r}, and this rank holds {_part(parts.get(name))}: "
                "load it with the same number of ranks and wrapping, on the rank that "
                "saved it; full and sharded state dicts fit any"
            )
    key_of_name = {names[param]: key for key, param in keys.param_of_key.items()}
    result: dict[str, Any] = {
        "state": {
            key_of_name.get(name, name): {
                k: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v)
                for k, v in state.items()
            }
            for name, state in state_dict["state"].items()
        }
    }
    if "param_groups" in state_dict:
        for group in state_dict["param_groups"]:
            for name in group["params"]:
                if name not in key_of_name:
                    raise ValueError(
                        f"parameter {name!r} of the local optimizer state dict is not "
                        "one that the optimizer steps under this name: set the same "
                        "use_orig_params"
                    )
        result["param_groups"] = [
            {
                **copy.deepcopy(group),
                "params": [key_of_name[n] for n in group["params"]],
            }
            for group in state_dict["param_groups"]
        ]
    return result


def _part(part: list[int] | None) -> str:
    if part is None:
        return "nothing"
    begin, end, numel = part
    return f"elements {begin} to {end} of {numel}"
