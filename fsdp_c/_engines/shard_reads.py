"""Says in an exception that a module read shards, because its unit was not called.

Such a module fails with the words of an operator ("'weight' must be 2-D"), which do not
lead to the cause. The note names it.
"""

import functools
import weakref
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from torch import nn

from fsdp_c import _native
from fsdp_c._torch_compat import interpreted_with_callees
from fsdp_c._units.names import clean_name
from fsdp_c._units.owner import Owner, Running

_TOLD = "_fsdp_c_is_told"  # in an exception that a unit has seen
_WITH_SHARDS = ("SHARDED", "PREFETCHED", "UNSHARDING")


def explain_shard_reads(owned: Sequence[tuple[Owner, _native.Unit]]) -> None:
    """Add a note to the exceptions of forwards in which a module read shards.

    Python 3.10 has no notes, and nothing is added.

    Args:
        owned: The owners and units of one engine.
    """
    for owner, unit in owned:
        unit.note_failures(functools.partial(_explain, weakref.ref(owner)))


@interpreted_with_callees
def _explain(ref: "weakref.ref[Owner]", error: BaseException) -> None:
    """Explain ``error``, with which a forward failed, if no unit inside has done so."""
    owner = ref()
    if owner is None or owner._running is None or hasattr(error, _TOLD):
        return
    with suppress(AttributeError):
        setattr(error, _TOLD, True)
    module = _innermost_module(error.__traceback__)
    if module is None or not hasattr(error, "add_note"):
        return
    holder, name = _owner_of(module, owner._running)
    if holder is None or holder is owner or holder.made_unit is None:
        return
    if holder.made_unit.state not in _WITH_SHARDS:
        return
    subject = f"{type(module).__name__} {name!r}" if name else type(module).__name__
    api = "" if isinstance(holder, nn.Module) else "_fsdp"
    error.add_note(
        f"fsdp_c: {subject} ran with shards: unit {holder.made_unit.name!r} gathers "
        "its parameters in forward, which was not called. Call the unit's module, or "
        f"pass the method that you call to fsdp_c.register{api}_forward_method()."
    )


def _innermost_module(traceback: TracebackType | None) -> nn.Module | None:
    """Return the module that ran last; None if its unit failed before it ran."""
    module, code = None, None
    while traceback is not None:
        own = traceback.tb_frame.f_locals.get("self")
        if isinstance(own, nn.Module):
            module, code = own, traceback.tb_frame.f_code
        traceback = traceback.tb_next
    has_run = code is not getattr(type(module).__call__, "__code__", None)
    return module if has_run else None


def _owner_of(module: nn.Module, running: Running) -> tuple[Owner | None, str]:
    """Return who owns the smallest unit around ``module``, and its name in there."""
    found: tuple[Owner | None, str] = None, ""
    smallest = 0
    for ref in running.members:
        owner = ref()
        for around in () if owner is None else owner.unit_modules:
            names = {each: name for name, each in around.named_modules()}
            if module in names and (not smallest or len(names) < smallest):
                found = owner, clean_name(names[module])
                smallest = len(names)
    return found
