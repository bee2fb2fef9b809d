"""Sharded parameters: DTensors over this rank's rows."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fsdp_c._torch_compat import (
    joined_mesh,
    local_tensor,
    num_parts_along,
    strided_shard,
)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut.

    Attributes:
        dim: The dimension that the data parallel ranks cut.
        mesh: Of the sharded parameter: with the tensor parallel mesh, if there is one.
        placements: On it.
        shape: Of the whole parameter.
        local_shape: Of what the unit gathers: the part of a tensor parallel rank.
        parallel: The mesh and the placements of a parameter that is a DTensor.
    """

    dim: int
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    local_shape: torch.Size
    parallel: tuple[DeviceMesh, tuple[Placement, ...]] | None


def cut_of(
    param: nn.Parameter, dim: int, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> Cut:
    """Return how ``param`` is cut along ``dim``; both others are data parallel.

    Raises:
        RuntimeError: ``param`` is a DTensor whose mesh is not a part of the same mesh.
    """
    if not isinstance(param, DTensor):
        return Cut(dim, mesh, placements, param.shape, param.shape, None)
    parallel = (param.device_mesh, tuple(param.placements))
    num_parts = num_parts_along(param, dim)
    if num_parts > 1:
        placements = (*placements[:-1], strided_shard(dim, num_parts))
    return Cut(
        dim,
        joined_mesh(mesh, param.device_mesh),
        (*placements, *param.placements),
        param.shape,
        local_of(param).shape,
        parallel,
    )


def own_rows(param: Tensor, dim: int, rank: int, world_size: int) -> Tensor:
    """Return a contiguous copy of what torch.chunk along ``dim`` gives ``rank``."""
    size = param.size(dim)
    rows = -(-size // world_size)
    begin = min(rank * rows, size)
    part = param.detach().narrow(dim, begin, min(rows, size - begin))
    return part.clone(memory_format=torch.contiguous_format)


def as_dtensor(
    local: Tensor,
    shape: torch.Size,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
) -> DTensor:
    """Return a DTensor of ``shape``, of which this rank has ``local``."""
    with torch.no_grad():
        return DTensor.from_local(
            local,
            mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )


def shard_param(
    param: nn.Parameter, cut: Cut, mesh: DeviceMesh, device: torch.device
) -> nn.Parameter:
    """Return this rank's rows of ``param`` as a parameter, with its attributes.

    ``mesh`` is data parallel; its last dimension shards. Only the rows are moved to
    ``device``; on the meta device they stay there.
    """
    whole = local_of(param) if isinstance(param, DTensor) else param
    shard_dim = mesh.ndim - 1
    local = own_rows(
        whole, cut.dim, mesh.get_local_rank(shard_dim), mesh.size(shard_dim)
    )
    if not local.is_meta:
        local = local.to(device)
    dtensor = as_dtensor(local, param.shape, cut.mesh, cut.placements)
    sharded = nn.Parameter(dtensor, param.requires_grad)
    vars(sharded).update(vars(param))
    return sharded


def plain_param(sharded: nn.Parameter, cut: Cut) -> nn.Parameter:
    """Return a parameter for forward: what the unit gathers, without memory."""
    empty = torch.empty(cut.local_shape, dtype=sharded.dtype, device="meta")
    plain = nn.Parameter(empty, sharded.requires_grad)
    vars(plain).update(vars(sharded))
    return plain


def parallel_param(plain: nn.Parameter, cut: Cut, dtype: torch.dtype) -> nn.Parameter:
    """Return what modules see in the place of ``plain``: a tensor parallel DTensor.

    The unit brings its memory.
    """
    assert cut.parallel is not None
    mesh, placements = cut.parallel
    empty = torch.empty(0, dtype=dtype, device=mesh.device_type)
    dtensor = as_dtensor(empty, cut.shape, mesh, placements)
    parallel = nn.Parameter(dtensor, plain.requires_grad)
    vars(parallel).update(vars(plain))
    return parallel


def local_grad(grad: Tensor, cut: Cut) -> Tensor:
    """Return the local part of a gradient, placed like its parameter. Collective."""
    assert isinstance(grad, DTensor)
    assert cut.parallel is not None
    with torch.no_grad():
        return local_tensor(grad.redistribute(placements=cut.parallel[1]))


def local_of(sharded: Tensor) -> Tensor:
    """Return the local tensor of a sharded parameter."""
    assert isinstance(sharded, DTensor)
    return local_tensor(sharded)
