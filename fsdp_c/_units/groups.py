"""Which process groups a unit communicates over."""

import os
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.api import ShardingStrategy

from fsdp_c._torch_compat import HYBRID_SHARD_ZERO2, timeout_of
from fsdp_c._units.collectives import naming_ranks
from fsdp_c._units.device import current_accelerator
from fsdp_c._units.foreign_groups import ForeignGroup, is_foreign_group

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

    @property
    def shard_rank(self) -> int:
        """This rank in the sharding group; 0 where nothing is sharded."""
        return 0 if self.shard_group is None else self.shard_group.rank()

    @property
    def num_shards(self) -> int:
        """Ranks of the sharding group; 1 where nothing is sharded."""
        return 1 if self.shard_group is None else self.shard_group.size()

    @property
    def is_in_first_replica(self) -> bool:
        """Whether this rank is in the replica that contains the first rank."""
        return self.inter_node_group is None or self.inter_node_group.rank() == 0

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of all."""
        return self.process_group.rank() == 0 and self.is_in_first_replica


def choose_groups(
    process_group: Any, device_mesh: Any, strategy: ShardingStrategy
) -> Groups:
    """Return the groups for the constructor's ``process_group`` or ``device_mesh``.

    Objects with ``rank()`` and ``size()`` only are accepted as groups, as FSDP1 does;
    see :class:`fsdp_c._units.foreign_groups.ForeignGroup`.

    Source:
        ``_init_process_group_state`` (torch 2.13, ``fsdp/_init_utils.py``).
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "process_group and device_mesh were both given: pass only one of them"
        )
    sharding: ProcessGroup | None
    replicating: ProcessGroup | None
    if strategy in HYBRID:
        sharding, replicating = _hybrid_groups(process_group, device_mesh, strategy)
        process_group, inter_node_group = sharding, replicating
    else:
        process_group = _single_group(process_group, device_mesh, strategy)
        inter_node_group = None
        is_replicated = strategy is ShardingStrategy.NO_SHARD
        sharding = None if is_replicated else process_group
        replicating = process_group if is_replicated else None
    return Groups(
        process_group,
        inter_node_group,
        None if sharding is None or sharding.size() == 1 else sharding,
        None if replicating is None or replicating.size() == 1 else replicating,
    )


def _single_group(
    process_group: Any, device_mesh: Any, strategy: ShardingStrategy
) -> ProcessGroup:
    if device_mesh is not None:
        needed = "a 1-D mesh such as mesh['shard'], or use HYBRID_SHARD with a 2-D mesh"
        return _check_mesh(device_mesh, 1, strategy, needed).get_group(0)
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
        mesh = _check_mesh(device_mesh, 2, strategy, "a 2-D mesh")
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
    default = dist.group.WORLD if dist.is_available() else None
    if default is None:
        raise ValueError(
            "process_group is None and there is no default process group: call "
            "torch.distributed.init_process_group() first, or pass a group"
        )
    return default


def _check_mesh(
    device_mesh: Any, ndim: int, strategy: ShardingStrategy, needed: str
) -> DeviceMesh:
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(
            f"device_mesh must be a DeviceMesh, got {device_mesh!r}: make one with "
            "torch.distributed.init_device_mesh()"
        )
    if device_mesh.ndim != ndim:
        raise ValueError(
            f"device_mesh has {device_mesh.ndim} dimensions and sharding_strategy is "
            f"{strategy.name}: pass {needed} (replicate, shard)"
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
    if is_foreign_group(group):
        return ForeignGroup(group)
    raise TypeError(
        f"{argument} must be a torch.distributed.ProcessGroup, got {group!r}: "
        "make one with torch.distributed.new_group()"
    )


# HYBRID_SHARD without groups: shard inside a node, replicate across nodes --------

# This rank's groups: the ranks of its node, and its peers on all nodes.
_NodeGroups = tuple[ProcessGroup, ProcessGroup]

# Keyed by the default group (weakly, so gone with it) and by ranks per node.
_made: WeakKeyDictionary[ProcessGroup, dict[int, _NodeGroups]] = WeakKeyDictionary()


def node_groups(default_group: ProcessGroup) -> _NodeGroups:
    """Return the groups of this rank's node, and of its peers on all nodes.

    They are made once per process and default group, with its time limit, and then
    shared by all units, until the user destroys them: the first call is collective,
    for all ranks of ``default_group``. Ranks are taken to be numbered node by node.
    Example with 2 nodes of 4: rank 1 shards over ``[0, 1, 2, 3]`` and replicates over
    ``[1, 5]``.

    Source:
        ``_init_intra_and_inter_node_groups`` (torch 2.13,
        ``fsdp/_init_utils.py``).
    """
    world_size = default_group.size()
    num_local, source = _ranks_per_node(world_size)
    if world_size % num_local != 0:
        raise ValueError(
            f"HYBRID_SHARD without groups needs a world size that is a multiple of "
            f"the ranks per node, got {world_size} ranks and {num_local} per node "
            f"({source}): pass process_group=(shard_group, replica_group), or a 2-D "
            "device_mesh (replicate, shard)"
        )
    by_size = _made.setdefault(default_group, {})
    try:
        for group in by_size[num_local]:
            dist.get_process_group_ranks(group)
    except KeyError:  # none yet, or the user destroyed one
        by_size[num_local] = _make(default_group, world_size, num_local)
    return by_size[num_local]


def _ranks_per_node(world_size: int) -> tuple[int, str]:
    """Return how many ranks a node has, and how that is known."""
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text is not None:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(
                f"the environment has LOCAL_WORLD_SIZE={text!r}, which is not a number "
                "of ranks: let torchrun set it, or unset it"
            )
        return int(text), "LOCAL_WORLD_SIZE"
    if current_accelerator() is not None:
        return torch.accelerator.device_count(), "the number of its accelerators"
    return world_size, "all ranks"


def _make(default_group: ProcessGroup, world_size: int, num_local: int) -> _NodeGroups:
    nodes = [
        list(range(begin, begin + num_local))
        for begin in range(0, world_size, num_local)
    ]
    peers = [list(range(local, world_size, num_local)) for local in range(num_local)]
    make: Any = partial(
        dist.new_subgroups_by_enumeration,
        backend=dist.get_backend(default_group),
        timeout=timeout_of(default_group),  # not torch's own default
    )
    with naming_ranks(default_group, "making of the groups of HYBRID_SHARD"):
        own_node, _ = make(nodes)
        own_peers, _ = make(peers)
    return own_node, own_peers
