"""Rank 0 of ranks that do not exist, with ``FAKE_CUDA_NOOP=alone``."""

import ctypes
from datetime import timedelta

import torch
import torch.distributed as dist

_kept: list[dist.Store] = []  # c10d keeps only its C++ half


class AloneStore(dist.Store):
    """A store in which the ranks that do not exist count as this one does.

    Ranks tell each other by counters that all have come: torch's groups when they
    start, ours before they use NCCL. What rank 0 waits for else it sets itself.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._store = dist.HashStore()
        self._world_size = world_size

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, self._world_size * value)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(  # type: ignore[override]
        self, keys: list[str], timeout: timedelta | None = None
    ) -> None:
        self._store.wait(keys, timeout or self.timeout)

    def clone(self) -> dist.Store:
        return self


def join_alone(world_size: int) -> None:
    """Be rank 0 of a group over NCCL whose other ranks do not exist.

    Raises:
        RuntimeError: The process has others to wait for.
    """
    if not is_alone():
        raise RuntimeError("the fake CUDA runs with peers: set FAKE_CUDA_NOOP=alone")
    torch.cuda.set_device(0)
    store = AloneStore(world_size)
    _kept.append(store)
    dist.init_process_group("nccl", store=store, rank=0, world_size=world_size)


def is_alone() -> bool:
    """Return whether the fake CUDA of this process runs without peers."""
    loaded = ctypes.CDLL(None)
    try:
        answer = loaded.fakecuda_is_alone
    except AttributeError:  # it is not the fake CUDA
        return False
    answer.restype = ctypes.c_bool
    return bool(answer())
