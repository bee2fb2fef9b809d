"""How a module of fully_shard() runs: in the units of its groups."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp_c import _native
from fsdp_c._engines.engine import ensure_engine
from fsdp_c._fully_shard.group import Group
from fsdp_c._fully_shard.several import end_runs
from fsdp_c._torch_compat import interpreted, interpreted_with_callees


@interpreted
def run_forward(
    module: nn.Module,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run ``function``, the forward of ``module``, with whole parameters.

    If the module has several groups, their units are around each other, as if of
    nested modules.
    """
    groups: tuple[Group, ...] = module.__dict__["_fsdp_c_groups"]
    first = groups[0]
    if first.before_run is not None:
        first.before_run(module, args)
    if first._running is None:
        ensure_engine(module)
    assert first.unit is not None
    for group in groups[1:]:
        assert group.unit is not None
        function = functools.partial(_run_unit, group.unit, function)
    if len(first.modules) > 1:
        for group in groups:
            _note_run(group, module)
    output = first.unit.forward(function, args, kwargs)
    if first.several:
        end_runs(first.several)
    if first.arguments.precision.output_dtype is None:
        return output
    return first.arguments.cast_output(output)


@interpreted
def _run_unit(
    unit: _native.Unit, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return unit.forward(function, args, kwargs)


@interpreted_with_callees
def _note_run(group: Group, module: nn.Module) -> None:
    """Keep the parameters until the last module of the group has run."""
    assert group.unit is not None
    is_last = group.runs.begin(module)
    reshards = group.reshards_after_forward and is_last
    group.unit.set(reshard_after_forward=reshards)
