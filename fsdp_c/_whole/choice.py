"""Which parameters an optimizer of whole parameters takes, and which are the others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_c._state.parts import ParamPart

# Of a parameter, by name and unsharded shape: whether the optimizer takes it.
Chooser = Callable[[str, torch.Size], bool]
Chosen = Chooser | Iterable[str]


def chosen_groups(
    parts: Mapping[str, ParamPart], params: Any
) -> list[tuple[dict[str, Any], list[ParamPart]]]:
    """Return options and members of each group, of what the user asked for."""
    by_name = {name: part for part in parts.values() for name in part.names}
    asked: list[Any] = [params]
    if isinstance(params, Sequence) and any(isinstance(p, Mapping) for p in params):
        asked = list(params)
    groups = []
    taken: set[ParamPart] = set()
    for each in asked:
        is_group = isinstance(each, Mapping)
        options = {k: v for k, v in each.items() if k != "params"} if is_group else {}
        members = _chosen(by_name, parts, each["params"] if is_group else each)
        for part in members:
            if part in taken:
                raise ValueError(f"parameter {part.fqn!r} is chosen twice")
            taken.add(part)
        groups.append((options, members))
    if not taken:
        raise ValueError(
            "no parameter is chosen: the model has "
            + ", ".join(f"{n!r} {tuple(p.shape)}" for n, p in list(parts.items())[:5])
        )
    return groups


def _chosen(
    by_name: Mapping[str, ParamPart], parts: Mapping[str, ParamPart], asked: Any
) -> list[ParamPart]:
    if asked is None:
        return [part for part in parts.values() if part.param.requires_grad]
    if callable(asked):
        return [
            part
            for name, part in parts.items()
            if part.param.requires_grad and asked(name, part.shape)
        ]
    found = []
    for name in asked:
        if not isinstance(name, str):
            raise TypeError(
                "params must be a function of name and shape, names, or groups with "
                f"these, got {type(name).__name__}: a parameter of a sharded model is "
                "a part, which has no name of its own"
            )
        if name not in by_name:
            raise ValueError(f"the model has no parameter {name!r}")
        found.append(by_name[name])
    return found


def others_of(
    model: nn.Module, parts: Mapping[str, ParamPart], chosen: Sequence[ParamPart]
) -> list[nn.Parameter]:
    """Return the model's other parameters that are trained.

    Raises:
        ValueError: A flat parameter has both kinds.
    """
    taken = {part.param for part in chosen}
    for part in parts.values():
        if part.param in taken and part not in chosen:
            raise ValueError(
                f"parameter {part.fqn!r} is not chosen, and lies in a flat parameter "
                "with others that are: wrap with use_orig_params=True, or choose all"
            )
    return [
        param
        for param in model.parameters()
        if param.requires_grad and param not in taken
    ]
