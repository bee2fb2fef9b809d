"""Process groups that a body leaves behind, such as those of a device mesh."""

import contextlib
import gc
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def groups_destroyed() -> Iterator[None]:
    """Destroy, at the end, the process groups made inside. All ranks make all."""
    before = list(dist.distributed_c10d._world.pg_map)
    try:
        yield
    finally:
        gc.collect()  # models hold groups
        for group in list(dist.distributed_c10d._world.pg_map):
            if group not in before:
                dist.destroy_process_group(group)
