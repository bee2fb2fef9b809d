"""Deferred initialisation: gives a unit's meta parameters and buffers memory."""

from collections.abc import Callable, Sequence, Set
from itertools import chain
from typing import Any

import torch
from torch import nn

from fsdp_c._units.uses import is_taken


def _is_on_meta(module: nn.Module) -> bool:
    tensors = chain(module.parameters(recurse=False), module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in tensors)


def materialize(
    modules: Sequence[tuple[str, nn.Module]],
    param_init_fn: Callable[[nn.Module], Any] | None,
    device: torch.device,
    left_out: Set[nn.Parameter],
) -> bool:
    """Initialise meta parameters and buffers of a unit's own modules, by name.

    ``param_init_fn``, if given, is called for every module, as FSDP1 does. Without
    it, each module that has meta parameters or buffers of its own is emptied on
    ``device`` and its ``reset_parameters()`` called. Shared parameters stay
    shared: the first use is kept. Return whether there were any.

    Source:
        ``_materialize_with_param_init_fn``, ``_materialize_meta_module`` (torch
        2.13, ``fsdp/_init_utils.py``).
    """
    if not any(_is_on_meta(current) for _, current in modules):
        return False
    if any(param.is_meta for param in left_out):
        raise ValueError(
            "a meta parameter is shared between units: wrap the modules that share "
            "it in one unit, or initialise it before wrapping"
        )
    uses: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for _, current in modules:
        for name, param in current._parameters.items():
            if param is not None and param.is_meta:
                uses.setdefault(param, []).append((current, name))

    with torch.no_grad():
        for name, current in modules:
            if param_init_fn is not None:
                param_init_fn(current)
            elif _is_on_meta(current):
                _reset(name, current, device)

    for places in uses.values():
        first, first_name = places[0]
        kept = first._parameters.get(first_name)
        for current, name in places[1:]:
            if name in current._parameters:
                current._parameters[name] = kept
    return True


def _reset(name: str, module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ValueError(
            f"module {name or type(module).__name__!r} ({type(module).__name__}) has "
            "parameters or buffers on the meta device and no reset_parameters(): "
            "give it one, or pass param_init_fn"
        )
    for param in module.parameters(recurse=False):
        if is_taken(param):
            raise ValueError(
                f"module {name!r} holds a parameter of another unit next to meta "
                "ones: initialise it before wrapping"
            )
    module.to_empty(device=device, recurse=False)
    reset()
