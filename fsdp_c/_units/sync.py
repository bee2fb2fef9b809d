"""sync_module_states: rank 0's parameters and buffers reach all ranks."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_c import _native
from fsdp_c._units.batches import in_batches
from fsdp_c._units.failures import naming_ranks

# A broadcast carries at most this much; small tensors travel together.
CHUNK_NBYTES = 32 * 1024 * 1024


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
