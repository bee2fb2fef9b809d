"""The units of an engine, in its order, and the settings that advice may be about."""

import torch.distributed as dist

from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.names import clean_name
from fsdp_c.trace._data import UnitInfo


def units_of(root: ShardedModule) -> tuple[UnitInfo, ...]:
    """Return the units of the engine whose root is ``root``; its indices."""
    names = {id(module): name for name, module in root.named_modules()}
    return tuple(
        _info(clean_name(f"{names[id(module)]}.")[:-1], module)
        for module in sharded_modules(root)
    )


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    if group is None:
        return (dist.get_rank() if dist.is_initialized() else 0,)
    return tuple(dist.get_process_group_ranks(group))


def _info(name: str, module: ShardedModule) -> UnitInfo:
    config = module._sharded.config
    segments = module._sharded.unit.segments
    prefetch = config.backward_prefetch
    precision = config.mixed_precision
    reduced = {
        precision.reduce_dtype or precision.param_dtype or dtype
        for dtype, requires_grad, *_ in segments
        if requires_grad
    }
    return UnitInfo(
        name=name,
        strategy=config.sharding_strategy.name,
        num_params=len(module._sharded.unit.slots),
        unsharded_nbytes=sum(
            unsharded_numel * dtype.itemsize
            for dtype, _, _, unsharded_numel, *_ in segments
        ),
        reduce_dtypes=tuple(
            sorted(str(dtype).removeprefix("torch.") for dtype in reduced)
        ),
        forward_prefetch=config.forward_prefetch,
        backward_prefetch="" if prefetch is None else prefetch.name,
        shard_ranks=_ranks(config.groups.shard_group),
        replica_ranks=_ranks(config.groups.replica_group),
    )
