"""Warns when a module writes its parameters in forward, as EDM2 and VQ-VAE do.

What it writes is a copy of them, which goes when the unit is resharded. Torch's classes
drop it without a word.
"""

import functools
import warnings
import weakref
from collections.abc import Sequence

import torch

from fsdp_c import _native
from fsdp_c._torch_compat import interpreted_with_callees
from fsdp_c._units.names import clean_name
from fsdp_c._units.owner import Owner


def watch_writes(owned: Sequence[tuple[Owner, _native.Unit]]) -> None:
    """Warn, once, when a forward writes parameters to no effect.

    Not seen are writes through ``param.data``, which count no version.

    Args:
        owned: The owners and units of one engine.
    """
    told: list[str] = []
    for owner, unit in owned:
        unit.note_writes(functools.partial(_warn, weakref.ref(owner), unit.name, told))


@interpreted_with_callees
def _warn(
    ref: "weakref.ref[Owner]", unit: str, told: list[str], param: torch.Tensor
) -> None:
    owner = ref()
    if told or owner is None:
        return
    told.append(unit)
    names = (
        clean_name(f"{prefix}.{name}" if prefix else name)
        for around in owner.unit_modules
        for prefix, module in around.named_modules()
        for name, value in (*vars(module).items(), *module._parameters.items())
        if value is param
    )
    warnings.warn(
        f"FSDP unit {unit!r}: its parameter {next(names, '?')!r} was written during "
        "forward. In forward a module has a copy of its parameters: what it writes "
        "there is dropped when the unit is resharded. Write to the parameters after "
        "the optimizer's step; compute with a function of them "
        "(torch.nn.utils.parametrize); or hold what forward updates in a buffer.",
        stacklevel=1,
    )
