"""The form of tensors in a state dict, for parameters and optimizer states alike.

Saving moves each rank's part to the ranks that the form names. Loading moves sharded
tensors back into each rank's part.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.api import OptimStateDictConfig, StateDictConfig

from fsdp_c._native import Placement
from fsdp_c._state.exchange import ExchangeItem, Move, exchange
from fsdp_c._state.parts import ParamPart, Spread
from fsdp_c._state.sharded_tensors import (
    has_rows,
    local_part,
    sharded_dtype,
    wrap_chunk,
)
from fsdp_c._units.base import ShardedModule
from fsdp_c._units.cuts import rows_of
from fsdp_c._units.device import CPU
from fsdp_c._units.parallel import to_state


@dataclass(frozen=True)
class Form:
    """The form of the tensors in a state dict."""

    shards: bool = False  # all ranks get sharded tensors, in rows; else whole ones
    first: int | None = None  # the only rank, a global one, that gets them; None: all
    offload_to_cpu: bool = True
    # Sharded tensors are DTensors; None: if the unit has a device mesh.
    use_dtensor: bool | None = None

    @classmethod
    def of_config(
        cls,
        config: StateDictConfig | OptimStateDictConfig,
        *,
        shards: bool,
        first: int | None,
    ) -> "Form":
        use_dtensor = getattr(config, "_use_dtensor", False) or None
        return cls(shards, first, config.offload_to_cpu, use_dtensor)

    @property
    def is_wanted(self) -> bool:
        return self.first is None or self.first == dist.get_rank()

    def moves(
        self,
        module: ShardedModule,
        spread: Spread,
        indices: Sequence[int],
        sources: Sequence[Tensor | None],
        dtypes: Iterable[torch.dtype],
    ) -> list[Move]:
        """Return the moves of a unit's parameters, or of states, to who needs them.

        ``sources`` are this rank's parts; the results go to :meth:`of_exchanged`.
        """
        held = map(spread.sharded, indices)
        needed: Iterable[Placement]
        if self.shards:
            needed = map(spread.rows, indices)
        else:
            begin, end = 0, module.world_size
            if self.first is not None:
                begin = dist.get_group_rank(module.process_group, self.first)
                end = begin + 1
            needed = repeat(spread.whole(begin, end))
        shapes = map(spread.shapes.__getitem__, indices)
        return list(
            map(Move, sources, dtypes, indices, held, needed, repeat(None), shapes)
        )

    def of_exchanged(
        self,
        module: ShardedModule,
        shapes: Iterable[torch.Size],
        values: Sequence[Tensor],
    ) -> list[Any]:
        """Return the tensors for the state dict, of what this rank got of a unit."""
        device = CPU if self.offload_to_cpu else module.compute_device
        if any(value.device != device for value in values[:1]):  # all are on one
            values = [value.to(device) for value in values]
        if not self.shards:
            return list(values)  # in their shapes
        return [
            wrap_chunk(
                module, value.view(-1, *shape[1:]), shape, use_dtensor=self.use_dtensor
            )
            if has_rows(shape)
            else value
            for shape, value in zip(shapes, values, strict=True)
        ]

    def of_whole(self, module: ShardedModule | None, whole: Tensor) -> Any:
        """Return a copy of ``whole``, which all ranks of ``module`` have.

        Nothing is communicated. Outside of all modules it stays whole.
        """
        whole = whole.detach()
        device = CPU if self.offload_to_cpu else whole.device
        if module is None or not self.shards or not has_rows(whole.shape):
            return whole.to(device, copy=True)
        begin, end = rows_of(whole.shape[0], module.world_size, module.rank)
        rows = whole[begin:end]
        chunk = torch.empty_like(
            rows, device=device, memory_format=torch.contiguous_format
        )
        chunk.copy_(rows)
        return wrap_chunk(module, chunk, whole.shape, use_dtensor=self.use_dtensor)


# A parameter, the name of its state if it is one, this rank's part, and its dtype.
Saving = tuple[ParamPart, str, Tensor | None, torch.dtype]


def save_tensors(
    tensors: Iterable[tuple[Form, Saving]], what: str
) -> Iterator[tuple[ParamPart, str, Any]]:
    """Yield the tensors that this rank wants, each in its form.

    All ranks must call it with the same tensors of sharded parameters, and take all.
    """
    items = []
    for form, (part, key, own, dtype) in tensors:
        if part.shard_group is not None:
            (move,) = form.moves(part.over, part.spread, [part.index], [own], [dtype])
            items.append(ExchangeItem((form, key), part, move))
        elif form.is_wanted:
            assert own is not None  # each rank has the whole
            value = form.of_whole(part.module, own.reshape(part.shape))
            yield part, key, to_state(value, part.cut)
    for item, own in exchange(items, what):
        form, key = item.key
        if form.is_wanted:
            part = item.part
            (value,) = form.of_exchanged(part.over, [part.shape], [own])
            yield part, key, to_state(value, part.cut)


def load_item(
    part: ParamPart, key: str, value: Any, *, is_whole: bool = False
) -> ExchangeItem:
    """Return the exchange of a sharded tensor to this rank's part, or the whole."""
    needed = part.spread.sharded(part.index)
    if is_whole:
        needed = part.spread.whole(0, part.over.world_size)
    held = part.spread.rows(part.index)
    dtype = sharded_dtype(value)
    move = Move(local_part(value), dtype, part.index, held, needed)
    return ExchangeItem(key, part, move)
