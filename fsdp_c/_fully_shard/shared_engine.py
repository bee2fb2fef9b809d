"""The engine that the groups of one root share, and how a module runs in it."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d

from fsdp_c import _native
from fsdp_c._engines.engine import engine_listeners, watch_backwards
from fsdp_c._engines.optimizer_in_backward import adopt_in_backward_optimizers
from fsdp_c._engines.order_warning import watch_order
from fsdp_c._fully_shard.group import Group, SharedEngine, groups_in, groups_of
from fsdp_c._fully_shard.several import end_runs
from fsdp_c._torch_compat import (
    interpreted,
    interpreted_with_callees,
    outside_transforms,
)


@interpreted_with_callees
def ensure_engine(module: nn.Module) -> None:
    """Make an engine over all groups in ``module``, whose root it becomes.

    Only if its first group has none. A module that contains it and is called later
    makes another one; see Note [Roots] in fsdp_c._engines.engine.

    Raises:
        RuntimeError: A group is in the middle of a step with another engine, or has
            parameters without memory.
        ValueError: The groups are on several devices.
    """
    if groups_of(module)[0].running is None:
        # What is made here must not be torch.func's, nor inference mode's, alone.
        with outside_transforms(), torch.inference_mode(False), torch.no_grad():
            _make_engine(module)


def _make_engine(module: nn.Module) -> None:
    root = groups_of(module)[0]
    groups = groups_in(module)
    units = [each.ensure_unit(name) for each, name in groups.items()]
    for each, name in groups.items():
        adopt_in_backward_optimizers(each.followed(name))
    requested = [(unit, unit.state) for unit in units if unit.is_requested]
    for unit in units:
        unit.reshard()  # the old engine has the memory
    engine = _native.Engine(units)
    watch_backwards()
    is_debugging = c10d.get_debug_level() != c10d.DebugLevel.OFF
    engine.check_order(is_debugging)
    refs = {each: weakref.ref(each) for each in groups}
    if is_debugging and len(root.modules) == 1:  # else no forward begins an iteration
        modules = [each.modules[0] for each in groups]
        root_ref = refs[root]
        watch_order(
            list(zip(units, modules, strict=True)), lambda: _engine_of(root_ref())
        )
    several = [ref for each, ref in refs.items() if len(each.modules) > 1]
    running = SharedEngine(engine, refs[root], [*refs.values()], several)
    for each in groups:
        each.running = running
    for each in groups:
        each.apply_settings()
    for unit, state in requested:
        unit.unshard()
        if state == "UNSHARDED":
            unit.wait_unshard()
    for listener in engine_listeners:
        listener(module)


def _engine_of(group: Group | None) -> _native.Engine | None:
    if group is None or group.running is None:
        return None
    return group.running.engine


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
    groups = groups_of(module)
    first = groups[0]
    if first.before_run is not None:
        first.before_run(module, args)
    if first.running is None:
        ensure_engine(module)
    assert first.unit is not None
    for group in groups[1:]:
        assert group.unit is not None
        function = functools.partial(_run_unit, group.unit, function)
    if len(first.modules) > 1:
        for group in groups:
            _note_run(group, module)
    output = first.unit.forward(function, args, kwargs)
    if first.running is not None and first.running.several and first.is_root:
        end_runs(first.running.several)
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
