"""Whole tensors for full state dicts of fully_shard(), by exchanges.

torch gathers tensor by tensor, on all ranks. Here many go in one exchange, and only to
the ranks that want them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from fsdp_c._native import Placement
from fsdp_c._state.exchange import Move, exchange_in
from fsdp_c._units.collectives import in_batches
from fsdp_c._units.cuts import has_values, local_of, with_memory

# Of whole tensors in one exchange, unless one is larger.
_BATCH_NBYTES = 256 * 1024 * 1024


def with_whole_rows(state: Any, first: int | None) -> Any:
    """Return ``state`` with whole tensors in the place of DTensors by rows.

    All ranks must call it with the same state; other DTensors stay.

    Args:
        state: Dicts and lists, of anything.
        first: The only global rank that wants them, the others get empty tensors; None:
            all do.
    """
    found: dict[ProcessGroup, list[DTensor]] = {}
    for value in _leaves(state):
        group = _group_of_rows(value)
        if group is not None:
            found.setdefault(group, []).append(value)
    whole: dict[int, Tensor] = {}
    for group, values in found.items():
        sized = ((v, None, v.numel() * v.element_size()) for v in values)
        for batch in in_batches(sized, _BATCH_NBYTES):
            gathered = _gather(group, batch, first)
            whole.update(zip(map(id, batch), gathered, strict=True))
    return _replaced(state, whole)


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, dict):
        for value in state.values():
            yield from _leaves(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _leaves(value)
    else:
        yield state


def _replaced(state: Any, whole: dict[int, Tensor]) -> Any:
    if isinstance(state, dict):
        return {key: _replaced(value, whole) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_replaced(value, whole) for value in state)
    return whole.get(id(state), state)


def _group_of_rows(value: Any) -> ProcessGroup | None:
    """Return the group that cut a DTensor along dimension 0, if nothing else did."""
    if not isinstance(value, DTensor) or value.numel() == 0 or value.is_meta:
        return None
    cutting = [
        dim for dim, each in enumerate(value.placements) if not each.is_replicate()
    ]
    if len(cutting) != 1:
        return None
    placement = value.placements[cutting[0]]
    if type(placement) is not Shard or placement.dim != 0:
        return None
    if not has_values(local_of(value)):
        return None  # torch gathers what it wraps
    return value.device_mesh.get_group(cutting[0])


def _gather(
    group: ProcessGroup, values: Sequence[DTensor], first: int | None
) -> list[Tensor]:
    begin, end = 0, group.size()
    if first is not None:
        ranks = dist.get_process_group_ranks(group)
        if first not in ranks:
            return [local_of(value).new_empty(0) for value in values]
        begin = ranks.index(first)
        end = begin + 1
    held = Placement.rows([value.shape for value in values], group.size())
    needed = Placement.on_ranks([value.numel() for value in values], begin, end)
    moves = [
        Move(
            with_memory(local_of(value)),
            value.dtype,
            index,
            held,
            needed,
            shape=value.shape,
        )
        for index, value in enumerate(values)
    ]
    device = local_of(values[0]).device
    results = exchange_in(group, device, moves, "exchange of a full state dict")
    return [result.to(device) for result in results]
