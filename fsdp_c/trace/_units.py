"""What a trace tells of a unit: also the settings that advice may be about."""

import torch.distributed as dist

from fsdp_c._fully_shard.either import UnitFacts
from fsdp_c.trace._data import UnitInfo


def unit_info(unit: UnitFacts) -> UnitInfo:
    """Return what is recorded of a unit."""
    reduced = {
        unit.reduce_dtype or unit.param_dtype or dtype
        for dtype, requires_grad, *_ in unit.segments
        if requires_grad
    }
    return UnitInfo(
        name=unit.name,
        strategy=unit.strategy,
        num_params=sum(num_params for _, _, num_params, *_ in unit.segments),
        unsharded_nbytes=sum(
            unsharded_numel * dtype.itemsize
            for dtype, _, _, unsharded_numel, *_ in unit.segments
        ),
        reduce_dtypes=tuple(
            sorted(str(dtype).removeprefix("torch.") for dtype in reduced)
        ),
        forward_prefetch=unit.forward_prefetch,
        backward_prefetch=unit.backward_prefetch,
        shard_ranks=_ranks(unit.shard_group),
        replica_ranks=_ranks(unit.replica_group),
    )


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    if group is None:
        return (dist.get_rank() if dist.is_initialized() else 0,)
    return tuple(dist.get_process_group_ranks(group))
