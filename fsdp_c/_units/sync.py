"""sync_module_states: rank 0's parameters and buffers reach all ranks."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

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
    bucket: list[Tensor] = []
    bucket_nbytes = 0
    with torch.no_grad():
        for tensor in tensors:
            data = tensor.detach()
            if data.numel() == 0:
                continue
            if not data.is_contiguous():
                _broadcast_strided(data, group)
                continue
            flat = data.reshape(-1).view(torch.uint8)
            for chunk in torch.split(flat, CHUNK_NBYTES):
                if bucket and (
                    bucket_nbytes + chunk.numel() > CHUNK_NBYTES
                    or bucket[0].device != chunk.device
                ):
                    _broadcast_bucket(bucket, group)
                    bucket, bucket_nbytes = [], 0
                bucket.append(chunk)
                bucket_nbytes += chunk.numel()
        if bucket:
            _broadcast_bucket(bucket, group)


def _broadcast(data: Tensor, group: ProcessGroup) -> None:
    with naming_ranks(group, "broadcast of module states"):
        dist.broadcast(data, group=group, group_src=0)


def _broadcast_strided(data: Tensor, group: ProcessGroup) -> None:
    copy = data.contiguous()
    for chunk in torch.split(copy.reshape(-1).view(torch.uint8), CHUNK_NBYTES):
        _broadcast(chunk, group)
    data.copy_(copy)


def _broadcast_bucket(bucket: list[Tensor], group: ProcessGroup) -> None:
    if len(bucket) == 1:
        _broadcast(bucket[0], group)
        return
    joined = torch.cat(bucket)
    _broadcast(joined, group)
    for piece, chunk in zip(
        torch.split(joined, [chunk.numel() for chunk in bucket]), bucket, strict=True
    ):
        chunk.copy_(piece)
