"""Collectives that Python issues."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from fsdp_c import _native
from fsdp_c._torch_compat import serves_host
from fsdp_c._units.device import CPU

Item = TypeVar("Item")

# A broadcast carries at most this much; small tensors travel together.
CHUNK_NBYTES = 32 * 1024 * 1024


@contextmanager
def naming_ranks(group: ProcessGroup | None, operation: str) -> Iterator[None]:
    """Add to an error of a collective what the ranks of its group were doing.

    Put only the collective inside: any other RuntimeError would be reported as the
    failure of a rank. ``None`` is the default group, as in torch.distributed. A group
    cannot be used after a failure; ``operation`` is what the collective is for.
    """
    try:
        yield
    except NotImplementedError:
        raise  # of the backend, not of the ranks
    except RuntimeError as error:
        process_group = group or c10d._get_default_group()
        report = _native.describe_failure(process_group, str(error), operation)
        raise type(error)(report) from error


def in_batches(
    items: Iterable[tuple[Item, object, int]], most_nbytes: int
) -> Iterator[list[Item]]:
    """Yield the items, which come with a kind and bytes, in lists.

    The items of a list are consecutive, of one kind, and have at most ``most_nbytes``
    together. A larger item is in a list of its own.
    """
    batch: list[Item] = []
    kind: object = None
    nbytes = 0
    for item, its_kind, its_nbytes in items:
        if batch and (its_kind != kind or nbytes + its_nbytes > most_nbytes):
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        kind = its_kind
        nbytes += its_nbytes
    if batch:
        yield batch


def on_any_rank(
    flags: Sequence[bool], group: ProcessGroup, device: torch.device, operation: str
) -> list[bool]:
    """Return, for each flag, whether it is set on a rank of ``group``. Collective.

    Over a backend of the CPU if the group has one: then the host does not wait for
    what the device still has to do, torch makes no communicator on the device, and a
    rank that has died is known at once. Else on ``device``.

    Raises:
        RuntimeError: A rank failed; ``operation`` says what the flags are for.
    """
    if group.size() == 1:
        return list(flags)
    where = CPU if serves_host(group) else device
    found = torch.tensor(flags, dtype=torch.uint8, device=where)
    with naming_ranks(group, operation):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in found.tolist()]


def gathered_objects(
    value: Any, group: ProcessGroup | None, operation: str
) -> list[Any]:
    """Return what the ranks of ``group`` have, in their order; pickled. Collective.

    ``group`` and ``operation`` are as for :func:`naming_ranks`.
    """
    values: list[Any] = [value] * dist.get_world_size(group)
    if len(values) > 1:
        with naming_ranks(group, operation):
            dist.all_gather_object(values, value, group=group)
    return values


def object_of_first(value: Any, group: ProcessGroup | None, operation: str) -> Any:
    """Return what rank 0 of ``group`` has; otherwise as :func:`gathered_objects`."""
    values = [value]
    if dist.get_world_size(group) > 1:
        with naming_ranks(group, operation):
            dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def broadcast_from_first(tensors: Iterable[Tensor], group: ProcessGroup) -> None:
    """Overwrite ``tensors`` with those of rank 0 of ``group``.

    All ranks must pass tensors of the same dtypes and shapes, in the same order,
    on any device that the group serves. Needs ``2 * CHUNK_NBYTES`` of memory.
    """
    if group.size() == 1:
        return
    with torch.no_grad():
        for batch in in_batches(_chunks(tensors, group), CHUNK_NBYTES):
            joined = torch.cat(batch) if len(batch) > 1 else batch[0]
            _broadcast(joined, group)
            for piece, chunk in zip(
                torch.split(joined, [chunk.numel() for chunk in batch]),
                batch,
                strict=True,
            ):
                if joined is not chunk:
                    chunk.copy_(piece)


def _chunks(
    tensors: Iterable[Tensor], group: ProcessGroup
) -> Iterator[tuple[Tensor, torch.device, int]]:
    """Yield the bytes of contiguous tensors, with their device; broadcast the rest."""
    for tensor in tensors:
        data = tensor.detach()
        if data.numel() == 0:
            continue
        own = data.contiguous()
        for chunk in torch.split(own.reshape(-1).view(torch.uint8), CHUNK_NBYTES):
            if own is data:
                yield chunk, chunk.device, chunk.numel()
            else:
                _broadcast(chunk, group)
        if own is not data:
            data.copy_(own)


def _broadcast(data: Tensor, group: ProcessGroup) -> None:
    label = "broadcast of module states"
    with naming_ranks(group, label):
        # c10d would make a communicator of its own, for this alone.
        if not _native.broadcast(group, data, label):
            dist.broadcast(data, group=group, group_src=0)
