"""From the rows of sharded tensors to the shards of a unit: one collective.

Each rank sends to each other one exactly what of its rows lies in that one's shards,
so that the memory that it takes is a rank's part, and not a unit. Copy plans say what
that is: of this rank's rows to all shards, and of all rows to this rank's shard.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_c import _native
from fsdp_c._state.own_parts import OwnParts
from fsdp_c._state.sharded_tensors import aligned, dtype_of, local_part, shape_of
from fsdp_c._torch_compat import ShardedTensor
from fsdp_c._units.base import ShardedModule
from fsdp_c._units.failures import naming_ranks


class _Group:
    """The values of one dtype for the parameters of one segment.

    Between two ranks its elements go in the order of the receiver's shard.

    Args:
        module: A wrapped module.
        segment: Of its unit.
        dtype: Of the values, not necessarily of the segment.
        values: By parameter.
    """

    def __init__(
        self,
        module: ShardedModule,
        segment: int,
        dtype: torch.dtype,
        values: dict[int, ShardedTensor | DTensor],
    ) -> None:
        self.dtype = dtype
        self._chunks = {param: local_part(value) for param, value in values.items()}
        self.params = tuple(values)
        self._unit = module._unit
        layout = module._unit.layout
        num_ranks, rank = module.world_size, module.rank
        shapes = [
            tuple(shape_of(values[param])) if param in values else (0,)  # left out
            for param in range(len(layout.slots))
        ]
        self._own_rows = _native.Placement(
            [
                (param, begin, end, param, 0)
                for param, begin, end, _, _ in _native.Placement.rows(
                    shapes, num_ranks, rank=rank
                ).pieces
            ]
        )
        self._first = {piece[0]: piece[1] for piece in self._own_rows.pieces}
        self._num_ranks, self._rank = num_ranks, rank
        flat = _native.Placement.flat(layout, segment)
        self._sent = _native.CopyPlan(self._own_rows, flat).copies
        rows = _native.Placement.rows(shapes, num_ranks)
        flat = _native.Placement.flat(layout, segment, rank=rank)
        copies = _native.CopyPlan(rows, flat).copies
        self._received = sorted((copy[0], copy[3], copy[4]) for copy in copies)

    def sent_numels(self) -> list[int]:
        """Return how many elements go to each rank."""
        return self._numels((copy[2], copy[4]) for copy in self._sent)

    def received_numels(self) -> list[int]:
        """Return how many elements come from each rank."""
        return self._numels((source, numel) for source, _, numel in self._received)

    def _numels(self, runs: Iterable[tuple[int, int]]) -> list[int]:
        numels = [0] * self._num_ranks
        for rank, numel in runs:
            numels[rank] += numel
        return numels

    def pack(self, targets: Sequence[Tensor]) -> None:
        """Copy this rank's rows into what goes to each rank, 1-D."""
        pieces = []
        for target, copies in groupby(self._sent, key=lambda copy: copy[2]):
            place = 0
            for param, offset, _, _, numel in copies:
                begin = self._first[param] + offset
                pieces.append((param, begin, begin + numel, target, place))
                place += numel
        plan = _native.CopyPlan(self._own_rows, _native.Placement(pieces))
        like = targets[0]
        plan.run([self._chunk(p, like) for p in range(max(self.params) + 1)], targets)

    def _chunk(self, param: int, like: Tensor) -> Tensor | None:
        chunk = self._chunks.get(param)
        return None if chunk is None else chunk.to(like.device).contiguous()

    def unpack(self, sources: Sequence[Tensor], parts: dict[int, Tensor]) -> None:
        """Copy what came from each rank, 1-D, into parts of parameters."""
        pieces = []
        for source, copies in groupby(self._received, key=lambda copy: copy[0]):
            place = 0
            for _, begin, numel in copies:
                pieces.append((0, begin, begin + numel, source, place))
                place += numel
        own = []
        for param in parts:
            _, _, begin, end = self._unit.intersect(param, self._rank)
            own.append((0, begin, end, param, 0))
        # Of one "parameter", this rank's shard.
        plan = _native.CopyPlan(_native.Placement(pieces), _native.Placement(own))
        targets = [
            parts[param].to(self.dtype) if param in parts else None
            for param in range(max(parts) + 1)
        ]
        plan.run(sources, targets)
        for param, part in parts.items():
            converted = targets[param]
            if converted is not None and converted is not part:
                part.copy_(converted)


def load_rows(
    module: ShardedModule,
    values: Sequence[ShardedTensor | DTensor],
    uses: Sequence[int],
) -> None:
    """Copy sharded tensors into the shards of a unit, between steps.

    All ranks of the sharding group must pass the same tensors in the same order.

    Args:
        module: A wrapped module that is not summoned.
        values: Each in the chunks of
            :func:`fsdp_c._state.sharded_tensors.rows_of`, and of the shape of the
            parameter that it is for.
        uses: By value, the number of a use of that parameter. Of several values for
            one parameter the last counts.

    Raises:
        RuntimeError: The collective failed.
    """
    params = module._unit.param_of_use
    use_of = {params[use]: use for use in uses}
    groups = _groups_of(
        module,
        {params[use]: value for use, value in zip(uses, values, strict=True)},
    )
    sent = [group.sent_numels() for group in groups]
    send, send_views, send_nbytes = _buffer(module, groups, sent)
    for group, views in zip(groups, send_views, strict=True):
        group.pack(views)
    received = [group.received_numels() for group in groups]
    receive, views_of, receive_nbytes = _buffer(module, groups, received)
    if module.world_size == 1:
        receive.copy_(send)
    else:
        with naming_ranks(module.process_group, "loading of a sharded state dict"):
            dist.all_to_all_single(
                receive, send, receive_nbytes, send_nbytes, group=module.process_group
            )
    own = OwnParts(module)
    with torch.no_grad():
        for group, views in zip(groups, views_of, strict=True):
            group.unpack(views, {p: own.get(use_of[p]) for p in group.params})


def _buffer(
    module: ShardedModule, groups: Sequence[_Group], numels: Sequence[Sequence[int]]
) -> tuple[Tensor, list[list[Tensor]], list[int]]:
    """Return memory for what goes to, or comes from, all ranks.

    Args:
        module: A wrapped module.
        groups: Of values.
        numels: Their elements, by group and rank.

    Returns:
        The memory, as bytes; 1-D views of it, by group and rank; bytes by rank.
    """
    sizes = [
        [
            each[rank] * group.dtype.itemsize
            for group, each in zip(groups, numels, strict=True)
        ]
        for rank in range(module.world_size)
    ]
    nbytes = [sum(map(aligned, each)) for each in sizes]
    memory = torch.empty(sum(nbytes), dtype=torch.uint8, device=module.compute_device)
    views: list[list[Tensor]] = [[] for _ in groups]
    place = 0
    for each in sizes:
        for group, found, size in zip(groups, views, each, strict=True):
            found.append(memory[place : place + size].view(group.dtype))
            place += aligned(size)
    return memory, views, nbytes


def _groups_of(
    module: ShardedModule, values: dict[int, ShardedTensor | DTensor]
) -> list[_Group]:
    """Return the groups of values, by parameter; in the same order on all ranks."""
    slots = module._unit.slots
    found: dict[tuple[int, torch.dtype], dict[int, ShardedTensor | DTensor]] = {}
    for param, value in values.items():
        key = slots[param][0], dtype_of(value)
        found.setdefault(key, {})[param] = value
    return [_Group(module, *key, each) for key, each in found.items()]
