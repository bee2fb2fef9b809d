"""The arguments of fully_shard(), checked once."""

import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.tensor import Placement, Replicate, Shard

from fsdp_c._units.device import current_accelerator

# By shard group and number of ranks; they go with the group.
_part_meshes: MutableMapping[ProcessGroup, dict[int, DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, slots=True)
class Arguments:
    """What fully_shard() was told, for one group of modules.

    Attributes:
        mesh: 1-D, or 2-D ``(replicate, shard)``.
        device: Where the parameters are computed with.
        reshards: Whether to reshard after forward; None: unless it is the root.
        part_mesh: 2-D; the groups of its second dimension keep the parameters
            between forward and backward. None: no group does.
        placement_fn: Chooses the dimension in which a parameter is cut.
        precision: dtypes of compute, reduction and outputs.
        offloads: Shards and gradients stay in host memory.
    """

    mesh: DeviceMesh
    device: torch.device
    reshards: bool | None
    part_mesh: DeviceMesh | None
    placement_fn: Callable[[nn.Parameter], Any] | None
    precision: MixedPrecisionPolicy
    offloads: bool

    @property
    def shard_group(self) -> ProcessGroup:
        """The group over which parameters are cut."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def replica_group(self) -> ProcessGroup | None:
        """The group of the ranks with the same rows, where the mesh is 2-D."""
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None

    @property
    def part_group(self) -> ProcessGroup | None:
        """The group that keeps the parameters between forward and backward."""
        return None if self.part_mesh is None else self.part_mesh.get_group(1)

    @property
    def has_replicas(self) -> bool:
        """Whether gradients are all-reduced after the reduce-scatter."""
        return self.mesh.ndim == 2 and self.mesh.size(0) > 1

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """The placements of a parameter that is cut along ``dim``."""
        return (Shard(dim),) if self.mesh.ndim == 1 else (Replicate(), Shard(dim))

    def choose_dim(self, name: str, param: nn.Parameter) -> int:
        """Ask ``shard_placement_fn`` along which dimension ``param`` is cut.

        Raises:
            ValueError: It did not answer with a Shard of one of the dimensions.
        """
        placement = None if self.placement_fn is None else self.placement_fn(param)
        if placement is None:
            return 0
        if not isinstance(placement, Shard):
            raise ValueError(
                f"shard_placement_fn returned {placement!r} for parameter {name!r}: "
                "return a Shard or None (a mesh for single parameters is not "
                "supported by fsdp_c: call fully_shard on their modules instead)"
            )
        dim = placement.dim + param.ndim if placement.dim < 0 else placement.dim
        if not 0 <= dim < param.ndim:
            raise ValueError(
                f"shard_placement_fn returned {placement} for parameter {name!r}, "
                f"which has {param.ndim} dimensions"
            )
        return dim


def check_arguments(
    mesh: DeviceMesh | None,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    dp_mesh_dims: Any,
) -> Arguments:
    """Check the arguments of fully_shard().

    Raises:
        TypeError: One is of a wrong type.
        ValueError: One has a wrong value, or is not supported.
        AssertionError: A 2-D mesh has no names, as in torch.
    """
    if dp_mesh_dims is not None:
        raise ValueError(
            "dp_mesh_dims is not supported by fsdp_c: pass the data parallel part of "
            "the mesh, as mesh=mesh['dp']; parameters that are DTensors already are "
            "refused"
        )
    if mesh is None:
        mesh = _default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):  # torch's first words, in both
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: pass a "
            "1-D one, or (replicate, shard)"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified, as "
            "('replicate', 'shard')"
        )
    for argument, value, kind in (
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        ("offload_policy", offload_policy, OffloadPolicy),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{argument} must be a {kind.__name__}, got {value!r}")
    reshards = check_reshard(reshard_after_forward, mesh)
    part_mesh = None
    if isinstance(reshards, int) and not isinstance(reshards, bool):
        part_mesh = _part_mesh(mesh, reshards)
        reshards = True
    return Arguments(
        mesh=mesh,
        device=_device_of(mesh),
        reshards=reshards,
        part_mesh=part_mesh,
        placement_fn=shard_placement_fn,
        precision=mp_policy,
        offloads=isinstance(offload_policy, CPUOffloadPolicy),
    )


def check_reshard(value: Any, mesh: DeviceMesh) -> bool | int | None:
    """Check ``reshard_after_forward``; 1 and all ranks become a bool.

    Raises:
        ValueError: Neither a bool nor a divisor of the ranks.
    """
    if value is None or isinstance(value, bool):
        return value
    num_ranks = mesh.size(mesh.ndim - 1)
    if not isinstance(value, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group "
            f"size to reshard to, not {value!r}"
        )
    if value < 1 or num_ranks % value != 0:
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{num_ranks}, not {value}"
        )
    return value if 1 < value < num_ranks else value == num_ranks and num_ranks > 1


def _part_mesh(mesh: DeviceMesh, num_ranks: int) -> DeviceMesh:
    """Divide the shard groups into groups of ``num_ranks``; once, as it makes groups.

    All ranks of the job must call.
    """
    made = _part_meshes.setdefault(mesh.get_group(mesh.ndim - 1), {})
    if num_ranks not in made or not _has_groups(made[num_ranks]):
        made[num_ranks] = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, num_ranks))
    return made[num_ranks]


def _has_groups(mesh: DeviceMesh) -> bool:
    """Whether its groups exist: the world's may outlive them."""
    try:
        mesh.get_group(1)
    except RuntimeError:
        return False
    return True


def _default_mesh() -> DeviceMesh:
    """Return a 1-D mesh over all ranks, of the accelerator if there is one."""
    if not dist.is_initialized():
        raise ValueError(
            "mesh is None and there is no default process group: call "
            "torch.distributed.init_process_group() first, or pass a mesh"
        )
    accelerator = current_accelerator()
    device_type = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
