"""Which process groups a unit communicates over."""

from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.api import ShardingStrategy

from fsdp_c._torch_compat import HYBRID_SHARD_ZERO2
from fsdp_c._units.default_groups import node_groups
from fsdp_c._units.foreign_groups import ForeignGroup, RankAndSize

HYBRID = frozenset({ShardingStrategy.HYBRID_SHARD, HYBRID_SHARD_ZERO2})


class Groups(NamedTuple):
    """The groups of one unit.

    ``process_group`` is what FSDP1 calls so: the group that shards, or, with
    NO_SHARD, the one that replicates. ``shard_group`` and ``replica_group`` are
    None where they would hold this rank alone.
    """

    process_group: ProcessGroup
    inter_node_group: ProcessGroup | None
    shard_group: ProcessGroup | None
    replica_group: ProcessGroup | None


def choose_groups(
    process_group: Any,
    device_mesh: Any,
    strategy: ShardingStrategy,
) -> Groups:
    """Return the groups for the constructor's ``process_group`` or ``device_mesh``.

    Objects with ``rank()`` and ``size()`` only are accepted as groups, as FSDP1 does;
    see :class:`fsdp_c._units.foreign_groups.ForeignGroup`.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: Both or contradicting arguments were given, this rank is not
            in the group, or there is no default group yet.

    Source:
        ``_init_process_group_state`` (torch 2.13, ``fsdp/_init_utils.py``).
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "process_group and device_mesh were both given: pass only one of them"
        )
    if strategy in HYBRID:
        sharding, replicating = _hybrid_groups(process_group, device_mesh, strategy)
        return Groups(
            sharding,
            replicating,
            sharding if sharding.size() > 1 else None,
            replicating if replicating.size() > 1 else None,
        )
    group = _single_group(process_group, device_mesh, strategy)
    if group.size() == 1:
        return Groups(group, None, None, None)
    if strategy is ShardingStrategy.NO_SHARD:
        return Groups(group, None, None, group)
    return Groups(group, None, group, None)


def _single_group(
    process_group: Any, device_mesh: Any, strategy: ShardingStrategy
) -> ProcessGroup:
    if device_mesh is not None:
        mesh = _check_mesh(device_mesh)
        if mesh.ndim != 1:
            raise ValueError(
                f"device_mesh has {mesh.ndim} dimensions and sharding_strategy is "
                f"{strategy.name}: pass a 1-D mesh such as mesh['shard'], or use "
                "HYBRID_SHARD with a 2-D mesh (replicate, shard)"
            )
        return mesh.get_group(0)
    if process_group is None:
        return _default_group()
    if isinstance(process_group, tuple):
        raise ValueError(
            "process_group is a tuple, which only HYBRID_SHARD and "
            f"_HYBRID_SHARD_ZERO2 take, and sharding_strategy is {strategy.name}: "
            "pass one group, or change the strategy"
        )
    return _check_group("process_group", process_group)


def _hybrid_groups(
    process_group: Any, device_mesh: Any, strategy: ShardingStrategy
) -> tuple[ProcessGroup, ProcessGroup]:
    if device_mesh is not None:
        mesh = _check_mesh(device_mesh)
        if mesh.ndim != 2:
            raise ValueError(
                f"device_mesh has {mesh.ndim} dimensions and {strategy.name} needs a "
                "2-D mesh (replicate, shard)"
            )
        return mesh.get_group(1), mesh.get_group(0)
    if process_group is None:
        return node_groups(_default_group())
    if not isinstance(process_group, tuple) or len(process_group) != 2:
        raise ValueError(  # FSDP1's first words
            "Expected process_group to be passed in as either None or "
            "Tuple[dist.ProcessGroup, dist.ProcessGroup] but got "
            f"{type(process_group)}: {strategy.name} takes two groups, "
            "process_group=(shard_group, replica_group), a 2-D device_mesh "
            "(replicate, shard), or neither, to shard inside each node"
        )
    return (
        _check_group("process_group[0]", process_group[0]),
        _check_group("process_group[1]", process_group[1]),
    )


def _default_group() -> ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "process_group is None and there is no default process group: call "
            "torch.distributed.init_process_group() first, or pass a group"
        )
    default = dist.group.WORLD
    assert default is not None  # initialised
    return default


def _check_mesh(device_mesh: Any) -> DeviceMesh:
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(
            f"device_mesh must be a DeviceMesh, got {device_mesh!r}: make one with "
            "torch.distributed.init_device_mesh()"
        )
    return device_mesh


def _check_group(argument: str, group: Any) -> ProcessGroup:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{argument} does not contain this rank (new_group() returned "
            "NON_GROUP_MEMBER): wrap the model only on the ranks of the group"
        )
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, RankAndSize) and not isinstance(group, type):
        return ForeignGroup(group)
    raise TypeError(
        f"{argument} must be a torch.distributed.ProcessGroup, got {group!r}: "
        "make one with torch.distributed.new_group()"
    )
