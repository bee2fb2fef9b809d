"""Engines: which units run together, and which module is the root.

Note [Roots]
A wrapped module that is called without an engine makes one over all units in it and
becomes their root. When a module that contains it is called later, that module makes a
new engine over all units, which the others join. No root is final, so it does no harm
to call or summon a submodule first.

With ``TORCH_DISTRIBUTED_DEBUG=INFO`` or ``DETAIL`` the ranks compare what they are
about to do before every collective. If they run their units in different orders in the
first iteration, all raise an error that names the units. In later iterations each rank
takes part in the others' collectives, where that is possible. A rank that leaves the
order of its first iteration warns.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_c import _native
from fsdp_c._engines.optimizer_in_backward import adopt_in_backward_optimizers, unit_of
from fsdp_c._engines.order_warning import watch_order
from fsdp_c._torch_compat import interpreted_with_callees, replace_autograd_engine
from fsdp_c._units.base import Running, ShardedModule, sharded_modules

# Called with the root of every engine that is made.
engine_listeners: list[Callable[[nn.Module], object]] = []

# Roots with units that do not reshard after forward.
_keeping: WeakSet[ShardedModule] = WeakSet()


@functools.cache
def _hook_optimizers() -> None:
    register_optimizer_step_pre_hook(_show_shards)


@functools.cache
def watch_backwards() -> None:
    """Tell the engines of a call of autograd's; see csrc/torch/backward_calls.cpp."""
    replace_autograd_engine(_native.watched_engine)


def _show_shards(*_: Any) -> None:
    """Before the step of an optimizer, whose state is of the shards' shapes."""
    for root in tuple(_keeping):
        root._sharded.unit.show_kept(False)


@interpreted_with_callees
def ensure_engine(module: ShardedModule) -> _native.Engine:
    """Return the engine of ``module``; see Note [Roots].

    Raises RuntimeError inside a step with another engine, or if a parameter was
    replaced after wrapping; ValueError if units are on several devices.
    """
    if module._running is None:
        modules = list(sharded_modules(module))
        for each in modules:
            each._sharded.originals.check()
            adopt_in_backward_optimizers(unit_of(each))
        engine = _native.Engine([each._sharded.unit for each in modules])
        watch_backwards()
        is_debugging = c10d.get_debug_level() != c10d.DebugLevel.OFF  # INFO or DETAIL
        engine.check_order(is_debugging)
        if is_debugging:
            ref = weakref.ref(module)
            units = [(each._sharded.unit, each.wrapped) for each in modules]
            watch_order(units, lambda: _engine_of(ref()))
        running = Running(engine, weakref.ref(module), WeakSet(modules))
        for each in modules:
            each.join_engine(running)
        if any(each._sharded.config.keeps_params for each in modules):
            _hook_optimizers()
            _keeping.add(module)
        for listener in engine_listeners:
            listener(module)
    assert module._running is not None
    return module._running.engine


def _engine_of(module: ShardedModule | None) -> _native.Engine | None:
    return None if module is None else module._engine


@contextmanager
def shards_shown(module: ShardedModule) -> Iterator[None]:
    """Show shards, for a while, where a forward has left whole parameters.

    A loss that is there already may use those, so they are shown again.
    """
    unit = module._sharded.unit
    unit.show_kept(False)
    try:
        yield
    finally:
        unit.show_kept(True)


def release_engine(module: ShardedModule) -> None:
    """Let the engine of ``module`` go, for all its units; the next call makes one."""
    if module._running is None:
        return
    for each in module._running.members:
        each.join_engine(None)


def ensure_engines(module: nn.Module) -> list[_native.Engine]:
    """Return the engines of all wrapped modules in ``module``, parents first."""
    engines = [ensure_engine(each) for each in sharded_modules(module)]
    return list({id(engine): engine for engine in engines}.values())
