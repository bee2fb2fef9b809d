"""Parameter groups: from an optimizer's keys to names, and back."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_c._state.optim.keys import Key, ParamKeys

# Optimizers made of named parameters keep these beside "params".
_NAMES = "param_names"


def groups_by_name(
    state_dict: Mapping[str, Any], keys: ParamKeys
) -> list[dict[str, Any]] | None:
    """Return the groups of an optimizer's state dict with names for keys; None if none.

    A flat parameter's key becomes the names of all parameters in it.
    """
    if "param_groups" not in state_dict:
        return None
    groups = []
    for group in state_dict["param_groups"]:
        names = []
        for key in group["params"]:
            if key not in keys.parts:
                raise ValueError(
                    f"parameter {key!r} of the optimizer's state dict is none of the "
                    f"optimizer's {len(keys.parts)} parameters: pass the "
                    "optimizer that the state dict comes from"
                )
            names += [part.fqn for part in keys.parts[key]]
        renamed = copy.deepcopy({k: v for k, v in group.items() if k != "params"})
        if _NAMES in renamed:
            renamed[_NAMES] = list(names)
        renamed["params"] = names
        groups.append(renamed)
    return groups


def groups_for_optimizer(
    param_groups: Sequence[Mapping[str, Any]],
    keys: ParamKeys,
    *,
    target: Sequence[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return groups with names as those of an optimizer, with its keys.

    The groups are in the optimizer's order where that is known, else in the given.
    ``target`` are the optimizer's own groups, for the names that it keeps in them.
    """
    group_of_key = _groups_of_keys(param_groups, keys)
    wanted: list[tuple[list[Key], int]]
    if keys.groups is None:
        wanted = [
            ([k for k in keys.parts if group_of_key.get(k) == number], number)
            for number in range(len(param_groups))
        ]
    else:
        wanted = [
            _match(number, group, keys, group_of_key)
            for number, group in enumerate(keys.groups)
        ]
    results = []
    for number, (group, source) in enumerate(wanted):
        given = param_groups[source] if source < len(param_groups) else {}
        result: dict[str, Any] = copy.deepcopy(
            {k: v for k, v in given.items() if k not in ("params", _NAMES)}
        )
        if target is not None and _NAMES in target[number]:
            result[_NAMES] = list(target[number][_NAMES])
        is_named = any(isinstance(key, str) for key in group)
        result["params"] = sorted(group, key=str) if is_named else group
        results.append(result)
    return results


def _groups_of_keys(
    param_groups: Sequence[Mapping[str, Any]], keys: ParamKeys
) -> dict[Key, int]:
    """Return the number of the given group that has each of the optimizer's keys."""
    key_of_name = {
        name: key
        for key, parts in keys.parts.items()
        for part in parts
        for name in part.names
    }
    group_of_key: dict[Key, int] = {}
    for number, group in enumerate(param_groups):
        for name in group["params"]:
            key = key_of_name.get(name)
            if key is None:
                raise ValueError(_unknown(name, keys))
            if group_of_key.setdefault(key, number) != number:
                first = keys.parts[key][0].fqn
                raise ValueError(
                    f"parameter {name!r} is in parameter group {number} of the state "
                    f"dict, but others of its flat parameter ({first!r}, ...) are "
                    f"in group {group_of_key[key]}: one flat parameter is in one "
                    "group; wrap the model with use_orig_params=True"
                )
    return group_of_key


def _match(
    number: int, group: Sequence[Key], keys: ParamKeys, group_of_key: Mapping[Key, int]
) -> tuple[list[Key], int]:
    """Return the keys of an optimizer's group, and the given group that has them."""
    found: list[Key] = []
    sources: dict[int, str] = {}
    for key in group:
        part = keys.parts[key][0]
        if key in group_of_key:
            found.append(key)
            sources.setdefault(group_of_key[key], part.fqn)
        elif part.module is not None:
            raise ValueError(
                f"parameter {part.fqn!r} of parameter group {number} is in no "
                "parameter group of the state dict: load it into an optimizer over "
                "the same parameters"
            )
    if len(sources) > 1:
        (one, first), (other, second), *_ = sources.items()
        raise ValueError(
            f"parameters {first!r} and {second!r} are in one parameter group of the "
            f"optimizer and in groups {one} and {other} of the state dict: give the "
            "optimizer the same groups"
        )
    return found, next(iter(sources), number)


def _unknown(name: Any, keys: ParamKeys) -> str:
    where = (
        "not one that the optimizer steps: load it into an optimizer over the same "
        "parameters"
        if name in keys.names
        else "not in the model: load it into the model that it was saved from"
    )
    return (
        f"parameter {name!r} in the state dict's param_groups is {where} (parameter "
        "ids become names with rekey_optim_state_dict)"
    )
