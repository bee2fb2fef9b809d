"""Engines: which units run together, and which module is the root.

Note [Roots]
A sharded module that is called without an engine makes one over all units in it and
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

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_c import _native
from fsdp_c._engines.in_backward import adopt_in_backward_optimizers
from fsdp_c._engines.order_warning import watch_order
from fsdp_c._engines.replaced_params import watch_optimizers
from fsdp_c._engines.shard_reads import explain_shard_reads
from fsdp_c._engines.written_params import watch_writes
from fsdp_c._torch_compat import (
    interpreted_with_callees,
    outside_transforms,
    replace_autograd_engine,
)
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.owner import Running, owners_in, owners_of

# Called with the root of every engine that is made.
engine_listeners: list[Callable[[nn.Module], object]] = []

# Roots of FSDP1 with units that do not reshard after forward.
_keeping: WeakSet[ShardedModule] = WeakSet()


@functools.cache
def _hook_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)


@functools.cache
def _watch_backwards() -> None:
    """Tell the engines of a call of autograd's; see csrc/torch/backward_calls.cpp."""
    replace_autograd_engine(_native.watched_engine)


def _before_step(*_: Any) -> None:
    """Show an optimizer the shards: its state has their shapes, and it writes them."""
    _native.expect_writes()
    for root in tuple(_keeping):
        root._sharded.unit.show_kept(False)


@interpreted_with_callees
def ensure_engine(module: nn.Module) -> _native.Engine:
    """Return the engine of a sharded module, of either API; see Note [Roots].

    Raises:
        RuntimeError: A unit is in the middle of a step with another engine, or a
            parameter was replaced after wrapping, or has no memory.
        ValueError: The units are on several devices.
    """
    owner = owners_of(module)[0]
    if owner._running is None:
        # What is made here must not be torch.func's, nor inference mode's, alone.
        with outside_transforms(), torch.inference_mode(False), torch.no_grad():
            _make_engine(module)
    assert owner._running is not None
    return owner._running.engine


def _make_engine(module: nn.Module) -> None:
    owners = owners_in(module)
    next(iter(owners)).settle_ties(owners)
    units = [owner.prepare_unit(name) for owner, name in owners.items()]
    for owner in owners:
        adopt_in_backward_optimizers(owner)
    engine = _native.Engine(units)
    _watch_backwards()
    _hook_optimizers()
    watch_optimizers()
    owned = list(zip(owners, units, strict=True))
    explain_shard_reads(owned)
    watch_writes(owned)
    is_debugging = c10d.get_debug_level() != c10d.DebugLevel.OFF  # INFO or DETAIL
    engine.check_order(is_debugging)
    if is_debugging:
        watch_order(owned)
    running = Running(engine, tuple(map(weakref.ref, owners)))
    try:
        for owner in owners:
            owner.join_engine(running)
        for owner in owners:
            owner.begin_in_engine()
        if any(each._sharded.config.keeps_params for each in sharded_modules(module)):
            _keeping.add(next(sharded_modules(module)))
        for listener in engine_listeners:
            listener(module)
    except BaseException:  # an interrupt, too: the next call begins anew
        for owner in owners:
            owner.leave_engine()
        raise


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


def ensure_engines(module: nn.Module) -> list[_native.Engine]:
    """Return the engines of all sharded modules in ``module``, parents first."""
    engines = [ensure_engine(each) for each in module.modules() if owners_of(each)]
    return list({id(engine): engine for engine in engines}.values())
