"""Sharded parameters: DTensors over this rank's rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_c._torch_compat import is_cut, is_strided
from fsdp_c._units.cuts import Cut, as_dtensor, local_of, rows_of
from fsdp_c._units.device import note_use


def own_rows(param: Tensor, dim: int, rank: int, world_size: int) -> Tensor:
    """Return a contiguous copy of what torch.chunk along ``dim`` gives ``rank``."""
    if is_traceable_wrapper_subclass(param):
        return _own_rows_of_wrapper(param.detach(), dim, rank, world_size)
    begin, end = rows_of(param.size(dim), world_size, rank)
    part = param.detach().narrow(dim, begin, end - begin)
    return part.clone(memory_format=torch.contiguous_format)


def _own_rows_of_wrapper(param: Tensor, dim: int, rank: int, world_size: int) -> Tensor:
    """Cut a tensor that wraps others with the operators that torch's FSDP2 uses.

    Its class implements only some operators, those of ``_init_sharded_param`` in
    ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py`` (torch 2.13) among them.
    """
    size = param.size(dim)
    chunks = param.chunk(world_size, dim)
    sizes = [chunk.size(dim) for chunk in chunks]
    rows = [rows_of(size, world_size, each) for each in range(world_size)]
    if sizes != [end - begin for begin, end in rows if end > begin]:
        raise ValueError(f"its class cuts {size} rows into {sizes}")
    padded = param.new_zeros(chunks[0].size())
    if rank >= len(chunks):
        return padded.narrow(dim, 0, 0)
    own = padded.narrow(dim, 0, sizes[rank])
    if type(own) is not type(param):
        raise ValueError("aten.new_zeros and aten.slice do not return its class")
    own.copy_(chunks[rank])
    return own


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
    name: str,
    param: nn.Parameter,
    cut: Cut,
    rank: int,
    world_size: int,
    device: torch.device,
) -> nn.Parameter:
    """Return this rank's rows of ``param`` as a parameter, with its attributes.

    Only the rows are moved to ``device``; on the meta device they stay there.

    Raises:
        ValueError: ``param`` wraps other tensors, and its class cannot be cut so.
    """
    whole = local_of(param)
    try:
        local = own_rows(whole, cut.dim, rank, world_size)
    except Exception as error:
        if not is_traceable_wrapper_subclass(whole):
            raise
        raise ValueError(
            f"parameter {name!r} of shape {tuple(whole.shape)} is a "
            f"{type(whole).__name__}, which {world_size} ranks cannot cut along "
            f"dimension {cut.dim}: {error!s:.300}. Use a number of ranks that divides "
            "its rows into whole blocks, or list it in ignored_params"
        ) from error
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
