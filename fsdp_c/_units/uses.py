"""Uses: the places in a module tree that hold a unit's parameters."""

from typing import NamedTuple

import torch
from torch import nn


class ParamUse(NamedTuple):
    """One place that holds a parameter; a shared parameter has several."""

    module: nn.Module
    name: str  # in the module
    fqn: str  # clean, from the unit's module
    param: nn.Parameter
    shape: torch.Size  # of the whole parameter
    slot: int  # of the parameter in the unit, in the order of first uses


# The attribute of a parameter that names the unit which shards it, FSDP1's name.
_MARK = "_fsdp_flattened"


def mark_sharded(param: nn.Parameter, unit_name: str) -> None:
    setattr(param, _MARK, unit_name)


def sharding_unit(param: nn.Parameter) -> str | None:
    name: str | None = getattr(param, _MARK, None)
    return name


# Of a parameter that another one stands for: its name.
_REPLACED = "_fsdp_c_replaced"


def mark_replaced(param: nn.Parameter, name: str) -> None:
    """Note that the model no longer has ``param`` among its parameters."""
    setattr(param, _REPLACED, name)


def replaced_name(param: nn.Parameter) -> str | None:
    """Return the name that mark_replaced() was told; None: it is in use."""
    name: str | None = getattr(param, _REPLACED, None)
    return name


def check_is_parameter(now: object, what: str) -> None:
    """Refuse a tensor that stands in the place of the sharded parameter ``what``.

    Raises:
        RuntimeError: It does, as under ``torch.func.functional_call``.
    """
    if isinstance(now, nn.Parameter) or not isinstance(now, torch.Tensor):
        return
    raise RuntimeError(
        f"{what} is a tensor and no parameter now, as under "
        "torch.func.functional_call(), but a sharded module computes with its own "
        "parameters: transform functions of inputs (torch.func.jvp, vjp and grad, or "
        "torch.autograd.forward_ad), and let backward() compute the gradients of "
        "parameters"
    )


def is_flat_param(param: nn.Parameter) -> bool:
    """Return whether ``param`` is a flat parameter, ours or torch's."""
    return getattr(param, "_is_flat_param", False)


def is_taken(param: nn.Parameter) -> bool:
    """Return whether a unit shards ``param``, or it is a flat parameter."""
    return sharding_unit(param) is not None or is_flat_param(param)
