"""rekey_optim_state_dict: from parameter names to ids and back."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType

from fsdp_c._state.optim.keys import (
    Key,
    check_stepped,
    keys_of_either,
    renamed,
    warn_of_input,
)
from fsdp_c._state.parts import names_of_params


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Return a state dict with names for ids, or ids for names.

    PARAM_ID makes a full state dict loadable by the optimizer of an unsharded model;
    PARAM_NAME makes the state dict of such an optimizer loadable by a sharded model's.

    Args:
        optim_state_dict: To be renamed; returned as it is if it has such keys.
        optim_state_key_type: PARAM_NAME or PARAM_ID.
        model: The model that defines the names, usually not wrapped.
        optim_input: What its optimizer was constructed with. Deprecated.
        optim: Its optimizer; ``model.parameters()`` in order if both are None.

    Raises:
        AssertionError: ``optim_state_key_type`` is neither.
        ValueError: Keys are mixed, or not parameters of the optimizer.
    """
    warn_of_input(optim_input)
    state_dict = optim_state_dict
    if not isinstance(optim_state_key_type, OptimStateKeyType):
        raise AssertionError(
            "Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got "
            f"{optim_state_key_type!r}"
        )
    groups = state_dict.get("param_groups", [])
    in_groups = [key for group in groups for key in group["params"]]
    found = {type(key) for key in (*state_dict["state"], *in_groups)}
    if not found <= {str} and not found <= {int}:
        raise ValueError(
            f"Invalid parameter keys: {list(state_dict['state'])} and those of "
            "param_groups are neither all names nor all ids: do not mix state dicts"
        )
    to_names = optim_state_key_type is OptimStateKeyType.PARAM_NAME
    wanted = str if to_names else int
    if found <= {wanted}:
        return state_dict
    names = names_of_params(model)
    new_key: dict[Key, Key] = {}
    keys = keys_of_either(model, optim, optim_input)
    check_stepped(keys.param_of_key.values(), names)
    for key, param in keys.param_of_key.items():
        if to_names:
            new_key[key] = names[param][0]
        else:
            new_key.update(dict.fromkeys(names[param], key))

    def look_up(key: Key) -> Key:
        if key not in new_key:
            raise ValueError(
                f"parameter {key!r} of the state dict is none of the {len(new_key)} "
                "that the optimizer steps: pass the model and optimizer that the "
                "state dict is for"
            )
        return new_key[key]

    result = {**state_dict, **renamed(state_dict, look_up, look_up)}
    for group in result.get("param_groups", []):
        group["params"].sort()
    return result
