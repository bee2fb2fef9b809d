"""What carries the collectives of a test's ranks: shared memory, or c10d alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

SWITCH = "FSDP_C_SHM"


@contextmanager
def over(transport: str) -> Iterator[None]:
    """Engines first used in here try shm, or use c10d, on ranks that do the same."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = {"shm": "1", "c10d": "0"}[transport]
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


@contextmanager
def c10d_only() -> Iterator[None]:
    """Engines that are made in here use c10d, on every rank that does the same."""
    with over("c10d"):
        yield


def transport_of(group: dist.ProcessGroup) -> tuple[str, str]:
    """Return what carries a group's collectives on the CPU, and why c10d does."""
    from fsdp_c import _native

    return _native.transport(group, torch.device("cpu"))


def num_scratches() -> int:
    """Return how many scratch blocks reductions have: gloo's need two, shm none."""
    if os.environ.get(SWITCH) == "0":
        return 2
    return 0 if transport_of(dist.group.WORLD)[0] == "shm" else 2
