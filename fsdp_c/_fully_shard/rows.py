"""Sharded parameters: DTensors over this rank's rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_c._torch_compat import is_cut, is_strided
from fsdp_c._units.cuts import Cut, as_dtensor, local_of
from fsdp_c._units.device import note_use


def own_rows(param: Tensor, dim: int, rank: int, world_size: int) -> Tensor:
    """Return a contiguous copy of what torch.chunk along ``dim`` gives ``rank``."""
    size = param.size(dim)
    rows = -(-size // world_size)
    begin = min(rank * rows, size)
    part = param.detach().narrow(dim, begin, min(rows, size - begin))
    return part.clone(memory_format=torch.contiguous_format)


def part_of(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return a contiguous copy of what this rank has of ``whole``."""
    order = sorted(range(mesh.ndim), key=lambda dim: is_strided(placements[dim]))
    for dim in order:
        placement: Any = placements[dim]
        if is_cut(placement):
            rank = mesh.get_local_rank(dim)
            whole = own_rows(whole, placement.dim, rank, mesh.size(dim))
    return whole.detach().clone(memory_format=torch.contiguous_format)


def shard_param(
    param: nn.Parameter, cut: Cut, rank: int, world_size: int, device: torch.device
) -> nn.Parameter:
    """Return this rank's rows of ``param`` as a parameter, with its attributes.

    Only the rows are moved to ``device``; on the meta device they stay there.
    """
    whole = local_of(param) if isinstance(param, DTensor) else param
    local = own_rows(whole, cut.dim, rank, world_size)
    if not local.is_meta:
        local = local.to(device)
    dtensor = as_dtensor(local, param.shape, cut.mesh, cut.placements)
    sharded = nn.Parameter(dtensor, param.requires_grad)
    if not is_traceable_wrapper_subclass(whole):  # which keeps its tensors there
        vars(sharded).update(vars(param))
        note_use(whole)  # its module lets it go
    return sharded


def plain_param(sharded: nn.Parameter, cut: Cut) -> nn.Parameter:
    """Return a parameter for forward: what the unit gathers, without memory."""
    empty = torch.empty(cut.local_shape, dtype=sharded.dtype, device="meta")
    plain = nn.Parameter(empty, sharded.requires_grad)
    vars(plain).update(vars(sharded))
    return plain
