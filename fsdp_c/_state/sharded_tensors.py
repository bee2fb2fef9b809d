"""Sharded tensors: whole tensors in dim-0 chunks, one a rank, and back.

Rank r of the sharding group holds rows ``[r * step, (r + 1) * step)``, with
``step = ceil(rows / world_size)``; the last ranks may hold none. That is what
``torch.chunk`` gives, and what FSDP1 and torch.distributed.checkpoint read and write:
a ShardedTensor, or a DTensor over the device mesh.

A tensor that has no rows to share out (0-dim, or without elements) stays a plain
tensor, the same on all ranks.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as RowShard

from fsdp_c._torch_compat import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from fsdp_c._units.base import ShardedModule
from fsdp_c._units.cuts import as_dtensor, row_placements, rows_of


def is_sharded(value: object) -> TypeGuard[ShardedTensor | DTensor]:
    """Return whether ``value`` is a tensor of which each rank holds a part."""
    return isinstance(value, (ShardedTensor, DTensor))


def sharded_shape(value: ShardedTensor | DTensor) -> torch.Size:
    if isinstance(value, DTensor):
        return value.shape
    return torch.Size(value.metadata().size)  # size() warns of its deprecation


def sharded_dtype(value: ShardedTensor | DTensor) -> torch.dtype:
    if isinstance(value, DTensor):
        return value.dtype
    dtype: torch.dtype = value.metadata().tensor_properties.dtype
    return dtype


def has_rows(shape: torch.Size) -> bool:
    """Return whether a tensor of ``shape`` is shared out at all."""
    return len(shape) > 0 and shape.numel() > 0


def wrap_chunk(
    module: ShardedModule, chunk: Tensor, shape: torch.Size, *, use_dtensor: bool | None
) -> ShardedTensor | DTensor:
    """Return the sharded tensor of ``shape`` of which this rank holds ``chunk``.

    Its memory is used. ``use_dtensor=None``: where the module has a device mesh.
    """
    if use_dtensor is None:
        use_dtensor = module._sharded.config.device_mesh is not None
    if not use_dtensor:
        parts = []
        for rank in range(module.world_size):
            begin, end = rows_of(shape[0], module.world_size, rank)
            parts.append(([begin, *[0] * len(shape[1:])], [end - begin, *shape[1:]]))
        return sharded_tensor_of(module, chunk, shape, parts)
    mesh = module.dtensor_mesh
    return as_dtensor(chunk, shape, mesh, row_placements(mesh))


def sharded_tensor_of(
    module: ShardedModule,
    local: Tensor,
    shape: torch.Size,
    parts: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> ShardedTensor:
    """Return a ShardedTensor over the sharding group, without communication.

    ``parts`` are offsets and sizes of the ranks' parts; one without elements does not
    stand in the metadata. ``local`` is this rank's part of the whole of ``shape``.
    """
    group, mine = module.process_group, dist.get_rank()
    metadata, shards = [], []
    for rank, (offsets, sizes) in enumerate(parts):
        if torch.Size(sizes).numel() > 0:
            global_rank = dist.get_global_rank(group, rank)
            device = local.device.type
            if device != "cpu":
                num_devices = torch.get_device_module(local.device).device_count()
                device = f"{device}:{global_rank % num_devices}"
            place = f"rank:{global_rank}/{device}"
            metadata.append(ShardMetadata(list(offsets), list(sizes), place))
            if global_rank == mine:
                shards.append(Shard(local, metadata[-1]))
    result: ShardedTensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        sharded_tensor_metadata=ShardedTensorMetadata(
            shards_metadata=metadata,
            size=shape,
            tensor_properties=TensorProperties(
                dtype=local.dtype,
                layout=torch.strided,
                requires_grad=False,
                memory_format=torch.contiguous_format,
                pin_memory=False,
            ),
        ),
        process_group=group,
    )
    return result


def local_part(value: ShardedTensor | DTensor) -> Tensor | None:
    """Return this rank's part of ``value``, None where it holds none."""
    if isinstance(value, DTensor):
        local: Tensor = value.to_local()
        return local.detach()
    shards = value.local_shards()
    return shards[0].tensor.detach() if shards else None


def find_problem(module: ShardedModule, value: Any) -> str | None:
    """Return why ``value`` is not in the chunks of ``module``'s group, or None."""
    shape = sharded_shape(value)
    remedy = (
        "read a checkpoint of another number of ranks with torch.distributed."
        "checkpoint.load() into model.state_dict(), which reshards it"
    )
    if isinstance(value, DTensor):
        placements = value.placements
        is_by_rows = placements[-1] == RowShard(0) and all(
            each.is_replicate() for each in placements[:-1]
        )
        if not is_by_rows:
            return (
                f"is a DTensor with placements {tuple(placements)}, where Shard(0) "
                "in the last dimension of the mesh and Replicate() in the others is "
                "needed: redistribute() it"
            )
        num_ranks = value.device_mesh.size(-1)
        if num_ranks != module.world_size:
            return (
                f"is a DTensor over {num_ranks} ranks, and its unit is sharded over "
                f"{module.world_size}: {remedy}"
            )
    elif len(value.local_shards()) > 1:
        return f"has {len(value.local_shards())} local shards: one a rank is needed"
    begin, end = rows_of(shape[0], module.world_size, module.rank)
    expected = torch.Size([end - begin, *shape[1:]])
    part = local_part(value)
    actual = torch.Size([0, *shape[1:]]) if part is None else part.shape
    first = begin
    if isinstance(value, ShardedTensor) and part is not None:
        first = value.local_shards()[0].metadata.shard_offsets[0]
    if actual.numel() == expected.numel() == 0:
        return None
    if actual != expected or first != begin:
        return (
            f"has the local part {tuple(actual)} at row {first} on rank "
            f"{module.rank}, and {tuple(expected)} at row {begin} is needed for "
            f"{module.world_size} ranks: {remedy}"
        )
    return None
