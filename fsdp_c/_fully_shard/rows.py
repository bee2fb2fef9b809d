"""Sharded parameters: DTensors over this rank's rows."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def own_rows(param: Tensor, dim: int, rank: int, world_size: int) -> Tensor:
    """Return a contiguous copy of what torch.chunk along ``dim`` gives ``rank``."""
    size = param.size(dim)
    rows = -(-size // world_size)
    begin = min(rank * rows, size)
    part = param.detach().narrow(dim, begin, min(rows, size - begin))
    return part.clone(memory_format=torch.contiguous_format)


def as_dtensor(
    local: Tensor, like: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> DTensor:
    """Return a DTensor of the shape of ``like``, of which this rank has ``local``."""
    with torch.no_grad():
        return DTensor.from_local(
            local,
            mesh,
            placements,
            run_check=False,
            shape=like.shape,
            stride=torch.empty(like.shape, device="meta").stride(),
        )


def shard_param(
    param: nn.Parameter, dim: int, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> nn.Parameter:
    """Return this rank's rows of ``param`` as a parameter, with its attributes."""
    shard_dim = mesh.ndim - 1
    local = own_rows(param, dim, mesh.get_local_rank(shard_dim), mesh.size(shard_dim))
    sharded = nn.Parameter(
        as_dtensor(local, param, mesh, placements), param.requires_grad
    )
    vars(sharded).update(vars(param))
    return sharded


def plain_param(sharded: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the whole shape, without memory, for forward."""
    empty = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
    plain = nn.Parameter(empty, sharded.requires_grad)
    vars(plain).update(vars(sharded))
    return plain


def local_of(sharded: Tensor) -> Tensor:
    """Return the local tensor itself, where ``to_local()`` may return an alias."""
    assert isinstance(sharded, DTensor)
    local: Tensor = sharded._local_tensor
    return local
