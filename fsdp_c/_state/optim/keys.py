"""Keys: how an optimizer's state dict names parameters on this rank.

By position in the parameter groups (torch.optim), or by name (NamedOptimizer and
KeyedOptimizer, which use the names of ``model.named_parameters()``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_c._state.parts import ParamPart

Key = int | str


@dataclass(frozen=True)
class ParamKeys:
    """The parameters of an optimizer and their keys.

    Attributes:
        param_of_key: In the optimizer's order.
        key_of_param: The reverse.
        groups: Keys of each parameter group; None if the optimizer's groups are
            not known.
    """

    param_of_key: dict[Key, nn.Parameter]
    key_of_param: dict[nn.Parameter, Key]
    groups: list[list[Key]] | None


def keys_of_optimizer(
    model: nn.Module, optim: torch.optim.Optimizer, *, is_named: bool
) -> ParamKeys:
    """Return the keys of ``optim``'s own state dict.

    Args:
        model: The model whose parameters it steps.
        optim: The optimizer.
        is_named: Whether it uses names.

    Raises:
        ValueError: ``is_named``, and a parameter is not one of ``model``'s.
    """
    groups = [list(group["params"]) for group in optim.param_groups]
    if not is_named:
        return _by_position(groups)
    names = {param: name for name, param in model.named_parameters()}
    return _checked(
        [[_name_of(param, names) for param in group] for group in groups], groups
    )


def keys_of_input(
    model: nn.Module, optim_input: Sequence[Any] | Iterable[Any] | None
) -> ParamKeys:
    """Return the keys of an optimizer that was constructed with ``optim_input``.

    Args:
        model: The model.
        optim_input: Parameters, or dicts with "params"; ``model.parameters()`` if
            None.

    Raises:
        TypeError: It is neither.
        ValueError: It is empty.
    """
    if optim_input is None:
        return _by_position([list(model.parameters())], knows_groups=False)
    if not isinstance(optim_input, Iterable) or isinstance(optim_input, Mapping | str):
        raise TypeError(_bad_input(optim_input))
    items = list(optim_input)
    if not items:
        raise ValueError(
            "optim_input is empty: pass what the optimizer was constructed with, or "
            "better the optimizer as optim"
        )
    if all(isinstance(item, torch.Tensor) for item in items):
        return _by_position([items], knows_groups=False)
    if not all(isinstance(item, dict) and "params" in item for item in items):
        raise TypeError(_bad_input(optim_input))
    return _by_position([_as_list(item["params"]) for item in items])


def _as_list(params: Any) -> list[nn.Parameter]:
    return [params] if isinstance(params, nn.Parameter) else list(params)


def _bad_input(optim_input: Any) -> str:
    return (
        "optim_input must be an iterable of parameters, or of dicts with 'params', "
        f"got {type(optim_input).__name__}"
    )


def _by_position(
    groups: Sequence[Sequence[nn.Parameter]], *, knows_groups: bool = True
) -> ParamKeys:
    ids: list[list[Key]] = []
    num_params = 0
    for group in groups:
        ids.append(list(range(num_params, num_params + len(group))))
        num_params += len(group)
    keys = _checked(ids, groups)
    return (
        keys if knows_groups else ParamKeys(keys.param_of_key, keys.key_of_param, None)
    )


def _checked(
    keys: list[list[Key]], groups: Sequence[Sequence[nn.Parameter]]
) -> ParamKeys:
    param_of_key = {
        key: param
        for its_keys, group in zip(keys, groups, strict=True)
        for key, param in zip(its_keys, group, strict=True)
    }
    return ParamKeys(
        param_of_key, {param: key for key, param in param_of_key.items()}, keys
    )


def _name_of(param: nn.Parameter, names: Mapping[nn.Parameter, str]) -> str:
    name = names.get(param)
    if name is None:
        raise ValueError(
            f"the optimizer steps a parameter of shape {tuple(param.shape)} that is "
            "not in the model: make the optimizer of the wrapped model's parameters"
        )
    return name


def uses_names(optim_state_dict: Mapping[str, Any]) -> bool:
    """Return whether a state dict is keyed by names."""
    return isinstance(next(iter(optim_state_dict.get("state", {})), None), str)


def check_params(
    keys: ParamKeys, parts_of_param: Mapping[nn.Parameter, Sequence[ParamPart]]
) -> None:
    """Check that all parameters of an optimizer are the model's.

    Raises:
        ValueError: One is not.
    """
    strangers = [
        (key, param)
        for key, param in keys.param_of_key.items()
        if param not in parts_of_param
    ]
    if not strangers:
        return
    hidden = {
        use.param: use.fqn
        for its_parts in parts_of_param.values()
        for part in its_parts
        if part.module is not None and part.is_flat
        for use in part.module._sharded.originals.uses
    }
    key, param = strangers[0]
    what = (
        f"the original parameter {hidden[param]!r}, which a flat parameter stands for "
        "since wrapping"
        if param in hidden
        else f"parameter {key!r} of shape {tuple(param.shape)}, which is not in the "
        "model"
    )
    raise ValueError(
        f"the optimizer steps {what}: make the optimizer after wrapping, of the "
        "wrapped model's parameters"
    )
