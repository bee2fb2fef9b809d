"""rekey_optim_state_dict: from parameter names to ids and back."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType

from fsdp_c._state.optim.keys import Key, keys_of_input, keys_of_optimizer
from fsdp_c._units.names import clean_name


def rekey(
    state_dict: dict[str, Any],
    key_type: OptimStateKeyType,
    model: nn.Module,
    *,
    optim_input: Any,
    optim: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """Return ``state_dict`` with keys of ``key_type``; itself if it has them.

    Nothing is copied but the groups, and nothing is communicated.

    Args:
        state_dict: Full or sharded, or a plain optimizer's.
        key_type: PARAM_NAME or PARAM_ID.
        model: Defines the names; usually not wrapped.
        optim_input: Defines the ids, see
            :func:`fsdp_c._state.optim.keys.keys_of_input`.
        optim: Defines the ids instead.

    Raises:
        AssertionError: ``key_type`` is neither.
        ValueError: Keys are names and ids, or not the optimizer's parameters.
    """
    if not isinstance(key_type, OptimStateKeyType):
        raise AssertionError(
            "Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got "
            f"{key_type!r}"
        )
    groups = state_dict.get("param_groups", [])
    given = [
        *state_dict["state"],
        *(key for group in groups for key in group["params"]),
    ]
    found = {type(key) for key in given}
    if not found <= {str} and not found <= {int}:
        raise ValueError(
            f"Invalid parameter keys: {list(state_dict['state'])} and those of "
            "param_groups are neither all names nor all ids: do not mix state dicts"
        )
    wanted = str if key_type is OptimStateKeyType.PARAM_NAME else int
    if found <= {wanted}:
        return state_dict
    keys = (
        keys_of_input(model, optim_input)
        if optim is None or optim_input is not None
        else keys_of_optimizer(model, optim, is_named=False)
    )
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(clean_name(name))
    new_key: dict[Key, Key] = {}
    for key, param in keys.param_of_key.items():
        its_names = names.get(param)
        if its_names is None:
            raise ValueError(
                f"the optimizer steps a parameter of shape {tuple(param.shape)} (id "
                f"{key}) that is not in the model: pass the model that it is of"
            )
        if wanted is str:
            new_key[key] = its_names[0]
        else:
            new_key.update(dict.fromkeys(its_names, key))
    return _renamed(state_dict, _lookup(new_key))


def _lookup(new_key: Mapping[Key, Key]) -> Callable[[Key], Key]:
    def look_up(key: Key) -> Key:
        if key not in new_key:
            raise ValueError(
                f"parameter {key!r} of the state dict is none of the {len(new_key)} "
                "that the optimizer steps: pass the model and optimizer that the "
                "state dict is for"
            )
        return new_key[key]

    return look_up


def _renamed(
    state_dict: Mapping[str, Any], look_up: Callable[[Key], Key]
) -> dict[str, Any]:
    result = dict(state_dict)
    result["state"] = {
        look_up(key): value for key, value in state_dict["state"].items()
    }
    if "param_groups" in state_dict:
        groups: list[dict[str, Any]] = copy.deepcopy(state_dict["param_groups"])
        for group in groups:
            new: list[Any] = [look_up(key) for key in group["params"]]
            group["params"] = sorted(new)
        result["param_groups"] = groups
    return result
