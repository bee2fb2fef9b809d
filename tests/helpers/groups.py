"""Process groups of tests: destroyed at the end, or kept for all tests of a worker."""

import contextlib
import functools
import gc
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

kept_groups: list[dist.ProcessGroup] = []


@contextlib.contextmanager
def groups_kept() -> Iterator[None]:
    """Keep the groups made inside for all tests of the worker."""
    before = list(dist.distributed_c10d._world.pg_map)
    yield
    made = [g for g in dist.distributed_c10d._world.pg_map if g not in before]
    kept_groups.extend(g for g in made if g not in kept_groups)


def device_under_test() -> str:
    """Return the type of the device that the test makes its tensors on."""
    return torch.get_default_device().type


@functools.cache
def kept_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of this shape, the same one for all tests.

    What torch finds out about operators of DTensors it remembers by mesh, and finding
    it out is most of a short test's time.
    """
    with groups_kept():
        mesh = init_device_mesh(device_under_test(), shape, mesh_dim_names=names)
        for name in names:
            mesh[name]
    return mesh


@contextlib.contextmanager
def hybrid_groups(
    num_replicas: int, num_shards: int
) -> Iterator[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
    """Yield this rank's shard group and replica group; all ranks make all.

    The ranks of a shard group follow each other, as in a device mesh
    ``(replicate, shard)``.
    """
    rank = dist.get_rank()
    assert num_replicas * num_shards == dist.get_world_size()
    shard_ranks = [
        [replica * num_shards + shard for shard in range(num_shards)]
        for replica in range(num_replicas)
    ]
    replica_ranks = [list(ranks) for ranks in zip(*shard_ranks, strict=True)]
    mine = []
    for all_ranks in (shard_ranks, replica_ranks):
        groups = [(ranks, dist.new_group(ranks)) for ranks in all_ranks]
        mine.append(next(group for ranks, group in groups if rank in ranks))
    try:
        yield mine[0], mine[1]
    finally:
        gc.collect()  # models hold groups
        for group in mine:
            dist.destroy_process_group(group)


@contextlib.contextmanager
def first_ranks(num_ranks: int) -> Iterator[dist.ProcessGroup | None]:
    """Yield a group of the first ranks, None on the others. Collective."""
    group = dist.new_group(list(range(num_ranks)))
    is_inside = dist.get_rank() < num_ranks
    try:
        yield group if is_inside else None
    finally:
        if is_inside:
            gc.collect()  # models hold groups
            dist.destroy_process_group(group)


@contextlib.contextmanager
def groups_destroyed() -> Iterator[None]:
    """Destroy, at the end, the groups made inside: of a device mesh, for one."""
    before = list(dist.distributed_c10d._world.pg_map)
    try:
        yield
    finally:
        gc.collect()  # models hold groups
        for group in list(dist.distributed_c10d._world.pg_map):
            if group not in before and group not in kept_groups:
                dist.destroy_process_group(group)
