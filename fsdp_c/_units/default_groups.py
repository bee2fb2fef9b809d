"""HYBRID_SHARD without groups: shard inside a node, replicate across nodes."""

import os
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fsdp_c._torch_compat import timeout_of
from fsdp_c._units.device import current_accelerator


class NodeGroups(NamedTuple):
    """This rank's groups: the ranks of its node, and its peers on all nodes."""

    shard_group: ProcessGroup
    replica_group: ProcessGroup


# By default group (gone once that is destroyed) and ranks per node.
_made: WeakKeyDictionary[ProcessGroup, dict[int, NodeGroups]] = WeakKeyDictionary()


def node_groups(default_group: ProcessGroup) -> NodeGroups:
    """Return the node-wise groups of this rank.

    They are made once per process and default group, with its time limit, and then
    shared by all units, until the user destroys them: the first call is collective,
    for all ranks of ``default_group``. Ranks are taken to be numbered node by node.
    Example with 2 nodes of 4: rank 1 shards over ``[0, 1, 2, 3]`` and replicates over
    ``[1, 5]``.

    Raises:
        ValueError: The world size is no multiple of the ranks per node.

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
    if not _is_alive(by_size.get(num_local)):
        by_size[num_local] = _make(default_group, world_size, num_local)
    return by_size[num_local]


def _is_alive(groups: NodeGroups | None) -> bool:
    """Return whether there are such groups, neither destroyed by the user."""
    if groups is None:
        return False
    try:
        for group in groups:
            dist.get_process_group_ranks(group)
    except KeyError:  # not known to torch any more
        return False
    return True


def _ranks_per_node(world_size: int) -> tuple[int, str]:
    """Return how many ranks a node has, and how that is known."""
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text is not None:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(
                f"the environment has LOCAL_WORLD_SIZE={text!r}, which is no number "
                "of ranks: let torchrun set it, or unset it"
            )
        return int(text), "LOCAL_WORLD_SIZE"
    if current_accelerator() is not None:
        return torch.accelerator.device_count(), "its accelerators"
    return world_size, "all, without accelerators or LOCAL_WORLD_SIZE"


def _make(default_group: ProcessGroup, world_size: int, num_local: int) -> NodeGroups:
    nodes = [
        list(range(begin, begin + num_local))
        for begin in range(0, world_size, num_local)
    ]
    peers = [list(range(local, world_size, num_local)) for local in range(num_local)]
    rank, backend = default_group.rank(), dist.get_backend(default_group)
    timeout = timeout_of(default_group)  # not torch's own default

    def own_group(rank_lists: list[list[int]]) -> ProcessGroup:
        # Every rank takes part in the making of every group.
        groups = [
            dist.new_group(ranks, backend=backend, timeout=timeout)
            for ranks in rank_lists
        ]
        own: ProcessGroup = groups[[rank in ranks for ranks in rank_lists].index(True)]
        return own

    return NodeGroups(own_group(nodes), own_group(peers))
