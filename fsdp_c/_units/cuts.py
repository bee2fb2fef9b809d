"""Cuts: how a parameter lies over data parallel and tensor parallel ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_c._torch_compat import (
    joined_meshes,
    local_tensor,
    num_parts_along,
    strided_shard,
)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut."""

    dim: int  # that the data parallel ranks cut
    mesh: DeviceMesh  # of the sharded one: with the tensor parallel mesh, if any
    placements: tuple[Placement, ...]  # on it
    shape: torch.Size  # of the whole parameter
    local_shape: torch.Size  # of what the unit gathers: a tensor parallel rank's part
    # The mesh and the placements of a parameter that is a DTensor.
    parallel: tuple[DeviceMesh, tuple[Placement, ...]] | None
    data_dims: frozenset[int] = frozenset()  # of that mesh; see dp_mesh_dims

    @property
    def parallel_groups(self) -> list[ProcessGroup]:
        """Those over which the local tensors are put together to ``shape``."""
        if self.parallel is None:
            return []
        mesh = self.parallel[0]
        dims = set(range(mesh.ndim)) - self.data_dims
        return [mesh.get_group(dim) for dim in sorted(dims)]


def cut_of(
    name: str,
    param: nn.Parameter,
    dim: int,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
) -> Cut:
    """Return how ``param`` is cut along ``dim``, if it can be.

    ``mesh`` and ``placements`` are data parallel.
    """
    if not isinstance(param, DTensor):
        return Cut(dim, mesh, placements, param.shape, param.shape, None)
    kind, expected = param.device_mesh.device_type, mesh.device_type
    if kind != expected:  # torch's first words
        raise ValueError(
            "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
            f"{kind} for DTensor and {expected} for FSDP: parameter {name!r}"
        )
    check_placements(name, param)
    parallel = (param.device_mesh, tuple(param.placements))
    num_parts = num_parts_along(param, dim)
    if num_parts > 1:
        placements = (*placements[:-1], strided_shard(dim, num_parts))
    return Cut(
        dim,
        _join(name, mesh, param.device_mesh),
        (*placements, *param.placements),
        param.shape,
        local_of(param).shape,
        parallel,
    )


def rows_of(num_rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the rows ``[begin, end)`` that torch.chunk gives ``rank``."""
    step = -(-num_rows // world_size)
    return min(rank * step, num_rows), min((rank + 1) * step, num_rows)


def row_placements(mesh: DeviceMesh) -> tuple[Placement, ...]:
    return (*[Replicate()] * (mesh.ndim - 1), Shard(0))


def row_cut(name: str, param: nn.Parameter, mesh: DeviceMesh) -> Cut:
    """Return how ``param`` is cut in rows; see :func:`cut_of`."""
    return cut_of(name, param, 0, mesh, row_placements(mesh))


def check_placements(name: str, param: DTensor) -> None:
    """Check that no placement of ``param`` is Partial."""
    if any(placement.is_partial() for placement in param.placements):
        raise ValueError(
            f"parameter {name!r} has the placements {tuple(param.placements)}: a "
            "parameter cannot be Partial, redistribute() it before"
        )


def _join(name: str, mesh: DeviceMesh, parallel: DeviceMesh) -> DeviceMesh:
    try:
        return joined_meshes([mesh, parallel])
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"parameter {name!r} is a DTensor on {parallel}, which is not a part of "
            f"the same mesh as {mesh}: make one mesh with init_device_mesh(), pass "
            "one part of it to parallelize_module() and the other one here"
        ) from error


def as_dtensor(
    local: Tensor,
    shape: torch.Size,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
) -> DTensor:
    """Return a DTensor of ``shape``, of which this rank has ``local`` itself.

    ``local`` may be on another device than the mesh.
    """
    # from_local() would move what is elsewhere, and makes a view: that would keep the
    # memory that `local` leaves, and not every class of tensors has views.
    like = torch.empty(local.shape, dtype=local.dtype, device="meta")
    with torch.no_grad():
        made = DTensor.from_local(
            like,
            mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
    return like_dtensor(local, made)


def like_dtensor(local: Tensor, other: DTensor) -> DTensor:
    """Return a DTensor like ``other``, of which this rank has ``local``; fast."""
    return DTensor(local, other._spec, requires_grad=False)  # type: ignore[no-untyped-call]


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
    """Return the local part of a gradient, placed like its parameter. Collective.

    What is Partial over data parallel ranks stays so: the unit reduces it.
    """
    assert isinstance(grad, DTensor)
    assert cut.parallel is not None
    wanted = [
        given if index in cut.data_dims and given.is_partial() else placement
        for index, (given, placement) in enumerate(
            zip(grad.placements, cut.parallel[1], strict=True)
        )
    ]
    with torch.no_grad():
        return local_tensor(grad.redistribute(placements=wanted))


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; another tensor is its own."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def with_memory(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or its values in a plain one if it only wraps others.

    So do the weights of torchao's float8; such a tensor has no memory of its own.
    """
    return copied_values(tensor) if is_traceable_wrapper_subclass(tensor) else tensor


def copied_values(tensor: Tensor) -> Tensor:
    """Return the values of a tensor of any class in a plain one.

    Raises:
        Exception: Its class does not implement ``copy_`` into a plain tensor.
    """
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        plain.copy_(tensor.detach())
    return plain


# Of classes of tensors: whether their values can be copied.
_with_values: dict[type, bool] = {Tensor: True, nn.Parameter: True}


def has_values(tensor: Tensor) -> bool:
    """Whether :func:`copied_values` can be; it is tried once for each class.

    torchao's NF4Tensor cannot, as others that implement only what they need.
    """
    cls = type(tensor)
    if cls not in _with_values:
        try:
            copied_values(tensor)
        except Exception:
            _with_values[cls] = False
        else:
            _with_values[cls] = True
    return _with_values[cls]
