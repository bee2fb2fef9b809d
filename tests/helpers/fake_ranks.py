"""A group whose collectives do nothing: rank 0 of ranks that do not exist."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Be rank 0 of the default group meanwhile."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
