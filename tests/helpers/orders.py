"""c10d's debug level, under which fsdp_c compares the orders of the ranks."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def debugging(level: str) -> Iterator[None]:
    """Set c10d's debug level, which TORCH_DISTRIBUTED_DEBUG sets at first."""
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    try:
        yield
    finally:
        dist.set_debug_level(before)
