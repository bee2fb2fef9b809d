"""Keys: how an optimizer's state dict names parameters on this rank.

By position in the parameter groups (torch.optim), or by name (NamedOptimizer and
KeyedOptimizer, which use the names of ``model.named_parameters()``).
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fsdp_c._state.parts import ParamPart

Key = int | str


@dataclass(frozen=True)
class ParamKeys:
    """The parameters of an optimizer and their keys, in its order."""

    param_of_key: dict[Key, nn.Parameter]
    groups: list[list[Key]] | None  # None if they are not known
    # What each stands for: itself, or the parameters of a flat one in the order of
    # their elements. Empty before with_parts().
    parts: dict[Key, list[ParamPart]] = field(default_factory=dict)
    names: frozenset[str] = frozenset()  # of all of the model, stepped or not

    @cached_property
    def key_of_param(self) -> dict[nn.Parameter, Key]:
        return {param: key for key, param in self.param_of_key.items()}

    def with_parts(self, parts: Mapping[str, ParamPart]) -> "ParamKeys":
        """Return the keys with ``parts``, which are those of the model."""
        of_param: dict[nn.Parameter, list[ParamPart]] = {}
        for part in parts.values():
            of_param.setdefault(part.param, []).append(part)
        for key, param in self.param_of_key.items():
            if param not in of_param:
                raise ValueError(_stranger(key, param, of_param))
        for its_parts in of_param.values():
            if len(its_parts) > 1:
                slots = its_parts[0].over._sharded.unit.slots
                its_parts.sort(key=lambda part: slots[part.index][1])
        return replace(
            self,
            parts={key: of_param[param] for key, param in self.param_of_key.items()},
            names=frozenset(name for part in parts.values() for name in part.names),
        )


def _stranger(
    key: Key, param: nn.Parameter, of_param: Mapping[nn.Parameter, list[ParamPart]]
) -> str:
    hidden = {
        use.param: use.fqn
        for its_parts in of_param.values()
        if its_parts[0].is_flat
        for use in its_parts[0].over._sharded.uses
    }
    what = (
        f"the original parameter {hidden[param]!r}, which wrapping replaced with "
        "a flat parameter"
        if param in hidden
        else f"parameter {key!r} of shape {tuple(param.shape)}, which is not in the "
        "model"
    )
    return (
        f"the optimizer steps {what}: make the optimizer after wrapping, of the "
        "wrapped model's parameters"
    )


def keys_of_optimizer(
    model: nn.Module, optim: torch.optim.Optimizer, *, is_named: bool
) -> ParamKeys:
    """Return the keys of ``optim``'s own state dict; ``is_named``: it uses names."""
    groups = [list(group["params"]) for group in optim.param_groups]
    if not is_named:
        return _by_position(groups)
    names = {param: name for name, param in model.named_parameters()}
    check_stepped((param for group in groups for param in group), names)
    return ParamKeys(
        {names[param]: param for group in groups for param in group},
        [[names[param] for param in group] for group in groups],
    )


def check_stepped(
    params: Iterable[nn.Parameter], known: Mapping[nn.Parameter, object]
) -> None:
    """Check that the model's parameters ``known`` have all that an optimizer steps."""
    for index, param in enumerate(params):
        if param not in known:
            raise ValueError(
                f"the optimizer steps a parameter of shape {tuple(param.shape)} "
                f"(number {index} in its groups) that is not in the model: pass the "
                "model that it belongs to, or an optimizer over this model's "
                "parameters, constructed after any wrapping"
            )


def keys_of_input(model: nn.Module, optim_input: Any) -> ParamKeys:
    """Return the keys of an optimizer that was constructed with ``optim_input``.

    These are parameters, or dicts with "params"; ``model.parameters()`` if None.
    """
    if optim_input is None:
        optim_input = list(model.parameters())
    if isinstance(optim_input, Iterable) and not isinstance(optim_input, Mapping | str):
        items = list(optim_input)
        if not items:
            raise ValueError(
                "optim_input is empty: pass what the optimizer was constructed with, "
                "or better the optimizer as optim"
            )
        if all(isinstance(item, torch.Tensor) for item in items):
            return ParamKeys(_by_position([items]).param_of_key, None)
        if all(isinstance(item, dict) and "params" in item for item in items):
            groups = [item["params"] for item in items]
            return _by_position(
                [[g] if isinstance(g, nn.Parameter) else list(g) for g in groups]
            )
    raise TypeError(
        "optim_input must be an iterable of parameters, or of dicts with 'params', "
        f"got {type(optim_input).__name__}"
    )


def warn_of_input(optim_input: Any, stacklevel: int = 3) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated: pass the optimizer as `optim` "
            "and leave it out",
            FutureWarning,
            stacklevel=stacklevel,
        )


def keys_of_either(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    optim_input: Any,
    *,
    is_named: bool = False,
) -> ParamKeys:
    if optim is None or optim_input is not None:
        return keys_of_input(model, optim_input)
    return keys_of_optimizer(model, optim, is_named=is_named)


def _by_position(groups: Sequence[Sequence[nn.Parameter]]) -> ParamKeys:
    params: list[nn.Parameter] = []
    keys: list[list[Key]] = []
    for group in groups:
        keys.append(list(range(len(params), len(params) + len(group))))
        params += group
    return ParamKeys(dict(enumerate(params)), keys)


def uses_names(optim_state_dict: Mapping[str, Any]) -> bool:
    """Return whether parameters are named: an optimizer may name other state, too."""
    groups = optim_state_dict.get("param_groups") or []
    keys = [key for group in groups for key in group["params"]]
    keys = keys or list(optim_state_dict.get("state", {}))
    return bool(keys) and all(isinstance(key, str) for key in keys)


def renamed(
    state_dict: Mapping[str, Any],
    state_key: Callable[[Key], Key],
    group_key: Callable[[Key], Key],
    copied: Callable[[Any], Any] = lambda state: state,
) -> dict[str, Any]:
    """Return state, its values ``copied``, and groups, if any, with other keys."""
    states = state_dict["state"].items()
    result: dict[str, Any] = {
        "state": {state_key(key): copied(state) for key, state in states}
    }
    if "param_groups" in state_dict:
        result["param_groups"] = [
            {
                **copy.deepcopy({k: v for k, v in group.items() if k != "params"}),
                "params": [group_key(key) for key in group["params"]],
            }
            for group in state_dict["param_groups"]
        ]
    return result
