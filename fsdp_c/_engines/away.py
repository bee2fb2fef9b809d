"""Shards that wait on another device, while something else needs the memory.

Reinforcement learning generates with an engine that wants the whole device, between two
phases of training. Programs then move flat parameters to the host and back, by
``_handle.flat_param_to()``. Only this rank's shard moves, and nothing is communicated.
The shard's storage on the unit's device is emptied and filled again, so the unit and
the optimizer keep their tensors; the unit cannot run in the meantime.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fsdp_c import _native
from fsdp_c._units.base import ShardedModule

# By segment.
_away: WeakKeyDictionary[ShardedModule, dict[int, Tensor]] = WeakKeyDictionary()


def shard_of(module: ShardedModule, segment: int) -> Tensor:
    """Return the shard of a segment, wherever it is."""
    shard = module._sharded.unit.shards[segment]
    return _away.get(module, {}).get(segment, shard)


def move_shard(
    module: ShardedModule, segment: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Move the shard of a segment, and what shows it, and return it.

    Args:
        module: Whose unit it is; between steps.
        segment: Its number.
        args: As of ``torch.Tensor.to``.
        kwargs: Likewise.

    Raises:
        RuntimeError: Inside a step or a summon.
        ValueError: Another dtype than the shard's.
    """
    sharded = module._sharded
    if module.is_in_step or sharded.unit.is_summoned or sharded.originals.parallel:
        raise RuntimeError(
            f"the shard of unit {sharded.name!r} cannot be moved inside a step or "
            "summon_full_params(), nor if its parameters are DTensors"
        )
    sharded.unit.show_kept(False)
    _native.expect_writes()
    home, now = sharded.unit.shards[segment], shard_of(module, segment)
    moved = now.to(*args, **kwargs)
    if moved.dtype != home.dtype:
        raise ValueError(
            f"the shard of unit {sharded.name!r} is {home.dtype} and cannot become "
            f"{moved.dtype} where it is moved: call module.to({moved.dtype})"
        )
    if moved.device != home.device:
        if module._running is not None:
            sharded.unit.reshard()  # without gradients that were cleared
        _away.setdefault(module, {})[segment] = moved
        _show(module, segment, moved)
        home.untyped_storage().resize_(0)
        return moved
    if now is not home:
        home.untyped_storage().resize_(home.nbytes)
        home.copy_(now, non_blocking=True)
        del _away[module][segment]
        _show(module, segment, home)
    return home


def _show(module: ShardedModule, segment: int, shard: Tensor) -> None:
    """Let the parameters of a segment, or its flat parameter, be views of ``shard``."""
    originals, unit = module._sharded.originals, module._sharded.unit
    flat_params = originals.flat_params()
    if flat_params:
        flat_params[segment].data = shard
        return
    with torch.no_grad():
        for use in originals.uses:
            if unit.slots[use.slot][0] == segment:
                begin, end, first, _ = unit.intersect(use.slot, module.shard_rank)
                use.param.data = shard.narrow(0, first, end - begin)
