"""What carries the collectives of a test's ranks: fsdp_c's own transport, or c10d.

On the CPU the own one is shared memory, on a GPU NCCL.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from helpers.distributed import TEST_DEVICE
from helpers.impl import fsdp

OWN = "shm" if TEST_DEVICE == "cpu" else "nccl"
SWITCH = "FSDP_C_TRANSPORT"


@contextmanager
def over(transport: str) -> Iterator[None]:
    """Engines first used in here try their own, or use c10d, on ranks that do so.

    Other values than these two are the switch's own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "" if transport == OWN else transport)
        yield


@contextmanager
def c10d_only() -> Iterator[None]:
    """Engines that are made in here use c10d, on every rank that does the same."""
    with over("c10d"):
        yield


def transport_of(group: dist.ProcessGroup) -> tuple[str, str]:
    """Return what carries a group's collectives on the device, and why c10d does."""
    from fsdp_c import _native

    return _native.transport(group, torch.device(TEST_DEVICE))


def meet(group: dist.ProcessGroup) -> tuple[str, str]:
    """Let a model use the group; return ``transport_of(group)`` then."""
    model = fsdp(torch.nn.Linear(4, 4), process_group=group)
    model(torch.ones(2, 4)).sum().backward()
    return transport_of(group)


def num_scratches(group: dist.ProcessGroup | None = None) -> int:
    """Return how many scratch blocks reductions have: gloo's need one, others none.

    Ask after the first step: a group has a transport from its first use on.
    """
    if TEST_DEVICE != "cpu":
        return 0
    if os.environ.get(SWITCH) == "c10d":
        return 1
    return 0 if transport_of(group or dist.group.WORLD)[0] == OWN else 1
