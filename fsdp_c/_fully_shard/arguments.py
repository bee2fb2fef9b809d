"""The arguments of fully_shard(), checked once."""

import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map_only

from fsdp_c._fully_shard.meshes import DataMesh, data_mesh_of
from fsdp_c._torch_compat import interpreted_with_callees
from fsdp_c._units.device import current_accelerator

# By shard group and number of ranks; they go with the group.
_part_meshes: MutableMapping[ProcessGroup, dict[int, DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, slots=True)
class Arguments:
    """What fully_shard() was told, for one group of parameters.

    Attributes:
        data: Over which ranks they are cut and replicated.
        device: Where they are computed with.
        reshard_after_forward: As passed.
        part_mesh: 2-D; the groups of its second dimension keep the parameters
            between forward and backward. None: no group does.
        placement_fn: Chooses the dimension in which a parameter is cut, and its mesh.
        precision: dtypes of compute, reduction and outputs.
        offloads: Shards and gradients stay in host memory.
    """

    data: DataMesh
    device: torch.device
    reshard_after_forward: bool | int | None
    part_mesh: DeviceMesh | None
    placement_fn: Callable[[nn.Parameter], Any] | None
    precision: MixedPrecisionPolicy
    offloads: bool

    @property
    def reshards(self) -> bool | None:
        """Whether to reshard after forward; None: unless it is the root."""
        if self.part_mesh is not None:
            return True
        value = check_reshard(self.reshard_after_forward, self.data)
        assert value is None or isinstance(value, bool)
        return value

    @property
    def part_group(self) -> ProcessGroup | None:
        """The group that keeps the parameters between forward and backward."""
        return None if self.part_mesh is None else self.part_mesh.get_group(1)

    @property
    def has_replicas(self) -> bool:
        """Whether gradients are all-reduced after the reduce-scatter."""
        group = self.data.replica_group
        return group is not None and group.size() > 1

    def over(self, data: DataMesh) -> "Arguments":
        """Return the same over another mesh. All ranks of it must call.

        Raises:
            ValueError: ``reshard_after_forward`` does not fit it.
        """
        return replace(
            self, data=data, part_mesh=_part_mesh(self.reshard_after_forward, data)
        )

    @interpreted_with_callees
    def cast_output(self, output: Any) -> Any:
        """Return what forward returned, in the output dtype, which is not None."""
        dtype = self.precision.output_dtype
        return tree_map_only(
            Tensor,
            lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor,
            output,
        )

    def choose(self, name: str, param: nn.Parameter) -> tuple[int, Any]:
        """Ask ``shard_placement_fn`` how ``param`` is cut.

        Returns:
            The dimension, and torch's FSDPMeshInfo of a mesh of its own, or None.

        Raises:
            AssertionError: ``param`` has no such dimension.
            ValueError: It answered with something else.
        """
        answer: Any = None if self.placement_fn is None else self.placement_fn(param)
        placement, info = answer, None
        if hasattr(answer, "mesh_info"):  # a ShardPlacementResult
            placement, info = answer.placement, answer.mesh_info
        if placement is None:
            return 0, info
        if not isinstance(placement, Shard):  # torch's first words
            raise ValueError(
                f"Invalid shard_placement_fn result: {answer!r} for parameter {name!r}:"
                " return a Shard, a ShardPlacementResult or None"
            )
        dim = placement.dim + param.ndim if placement.dim < 0 else placement.dim
        if not 0 <= dim < param.ndim:  # torch's class and first words
            raise AssertionError(
                f"Shard dim {placement.dim} is invalid for {param.ndim}D tensor: "
                f"shard_placement_fn returned {placement} for parameter {name!r}"
            )
        return dim, info


def check_arguments(
    mesh: DeviceMesh | None,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None,
    dp_mesh_dims: Any,
) -> Arguments:
    """Check the arguments of fully_shard().

    Raises:
        TypeError: One is of a wrong type.
        ValueError: One has a wrong value, or is not supported.
        AssertionError: A 2-D mesh has no names, as in torch.
        NotImplementedError: As torch, a number in ``reshard_after_forward`` with
            ``dp_mesh_dims``.
    """
    if mesh is None:
        mesh = _default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    data = data_mesh_of(mesh, dp_mesh_dims)
    for argument, value, kind in (
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        # None runs in torch, too.
        ("offload_policy", offload_policy or OffloadPolicy(), OffloadPolicy),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{argument} must be a {kind.__name__}, got {value!r}")
    is_number = isinstance(reshard_after_forward, int) and not isinstance(
        reshard_after_forward, bool
    )
    if is_number and data.spmd is not None and data.shards:  # torch's first words
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh "
            "(dp_mesh_dims): pass True or False"
        )
    if shard_placement_fn is not None and not data.shards:
        raise ValueError(
            "Per-param mesh via shard_placement_fn is not supported with DDPMeshInfo: "
            "dp_mesh_dims names no dimension that shards"
        )
    return Arguments(
        data=data,
        device=_device_of(mesh),
        reshard_after_forward=reshard_after_forward,
        part_mesh=_part_mesh(reshard_after_forward, data),
        placement_fn=shard_placement_fn,
        precision=mp_policy,
        offloads=isinstance(offload_policy, CPUOffloadPolicy),
    )


def check_reshard(value: Any, data: DataMesh) -> bool | int | None:
    """Check ``reshard_after_forward``; 1 and all ranks become a bool.

    Raises:
        ValueError: Neither a bool nor a divisor of the ranks.
    """
    if value is None or isinstance(value, bool):
        return value
    if not data.shards:  # as torch, which frees nothing then
        return None
    num_ranks = data.num_shards
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


def _part_mesh(value: Any, data: DataMesh) -> DeviceMesh | None:
    """Divide the shard groups, if ``reshard_after_forward`` is a number of ranks.

    Once, as it makes groups. All ranks of the job must call.
    """
    num_ranks = check_reshard(value, data)
    if num_ranks is None or isinstance(num_ranks, bool):
        return None
    mesh, group = data.mesh, data.shard_group
    assert group is not None
    made = _part_meshes.setdefault(group, {})
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
