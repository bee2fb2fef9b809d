"""LOCAL_STATE_DICT: this rank's shards as they lie, without communication.

One entry per segment of a unit, under the name of its flat parameter: a 1-D
ShardedTensor of the segment without the padding at its end. It can be loaded only
where the unit is sharded in the same way: same parameters, number of ranks and
use_orig_params. Elements have no names, so a unit whose order keep_whole() changed is
refused.

With use_orig_params programs save this rank's slices of the original parameters, and
copy them back into what ``state_dict()`` returns. So these stand there too, live.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch

from fsdp_c._state.parts import ParamPart, unit_parts
from fsdp_c._state.sharded_tensors import local_part, sharded_shape, sharded_tensor_of
from fsdp_c._torch_compat import ShardedTensor
from fsdp_c._units.base import ShardedModule
from fsdp_c._units.keep_whole import keeps_blocks
from fsdp_c._units.names import flat_param_name


class _Segment(NamedTuple):
    name: str
    numel: int  # up to the end of its last parameter
    ranges: list[tuple[int, int]]  # elements [begin, end) of each rank
    dtype: torch.dtype
    parts: list[tuple[ParamPart, int]]  # each with its place in this rank's shard


def _segments_of(module: ShardedModule) -> Iterator[_Segment]:
    unit = module._sharded.unit
    slots = unit.slots
    if keeps_blocks(module._sharded.uses, module._sharded.groups.num_shards):
        raise ValueError(
            f"unit {unit.name!r} keeps blocks whole, so its shards are in another "
            "order, which a LOCAL state dict does not tell: use SHARDED_STATE_DICT or "
            "FULL_STATE_DICT"
        )
    parts = unit_parts(module, as_shown=True)
    for index, (dtype, _, _, _, shard_numel, _) in enumerate(unit.segments):
        own = [part for part in parts if slots[part.index][0] == index]
        numel = max(slots[part.index][1] + part.shape.numel() for part in own)
        ends = [min(rank * shard_numel, numel) for rank in range(module.world_size + 1)]
        yield _Segment(
            flat_param_name(index),
            numel,
            list(pairwise(ends)),
            dtype,
            [(part, unit.intersect(part.index, module.rank)[2]) for part in own],
        )


def local_names(module: ShardedModule) -> list[str]:
    return [
        flat_param_name(index) for index in range(len(module._sharded.unit.segments))
    ]


def local_state(
    module: ShardedModule, *, offload_to_cpu: bool
) -> dict[str, ShardedTensor]:
    """Return the entries of a unit, by name; their local parts own their memory."""
    state = {}
    for segment in _segments_of(module):
        begin, end = segment.ranges[module.rank]
        device = "cpu" if offload_to_cpu else module._sharded.unit.shards[0].device
        local = torch.zeros(end - begin, dtype=segment.dtype, device=device)
        for part, offset in segment.parts:
            local[offset : offset + part.part_numel].copy_(part.home.values())
        state[segment.name] = sharded_tensor_of(
            module,
            local,
            torch.Size([segment.numel]),
            [([first], [last - first]) for first, last in segment.ranges],
        )
    return state


def find_local_problems(
    module: ShardedModule, state_dict: Mapping[str, object], prefix: str
) -> list[str]:
    """Return why the unit's entries in ``state_dict`` do not fit its shards."""
    problems = []
    remedy = (
        "a LOCAL state dict fits only the same wrapping, number of ranks and "
        "use_orig_params; use SHARDED_STATE_DICT or FULL_STATE_DICT across those"
    )
    unit = f"in unit {module._sharded.name!r}"
    for segment in _segments_of(module):
        key = f"{prefix}{segment.name}"
        if key not in state_dict:
            continue
        value = state_dict[key]
        if not isinstance(value, ShardedTensor):
            problems.append(
                f"{key!r} is a {type(value).__name__}, and LOCAL_STATE_DICT needs a "
                f"ShardedTensor of shape ({segment.numel},)"
            )
            continue
        if sharded_shape(value) != (segment.numel,):
            problems.append(
                f"size mismatch for {key}: shape {tuple(sharded_shape(value))} in the "
                f"state dict, ({segment.numel},) {unit}: {remedy}"
            )
            continue
        begin, end = segment.ranges[module.rank]
        part = local_part(value)
        numel = 0 if part is None else part.numel()
        offset = value.local_shards()[0].metadata.shard_offsets[0] if numel else begin
        if (offset, numel) != (begin, end - begin):
            problems.append(
                f"size mismatch for {key}: elements [{offset}, {offset + numel}) on "
                f"rank {module.rank} in the state dict, [{begin}, {end}) {unit}: "
                f"{remedy}"
            )
    return problems


def load_local(module: ShardedModule, values: Mapping[str, ShardedTensor]) -> None:
    """Copy checked entries, by name, into this rank's shards."""
    for segment in _segments_of(module):
        value = values.get(segment.name)
        local = None if value is None else local_part(value)
        if local is not None:
            for part, offset in segment.parts:
                part.home.values().copy_(local[offset : offset + part.part_numel])
