"""The fake CUDA of this process, for tests: its delays, memory and counts.

Tests that need neither counts nor a limit of the memory also run on a GPU.
"""

import ctypes
import os
from collections.abc import Callable, Iterator

import pytest

from helpers.distributed import distributed

IS_HERE = "FAKE_CUDA_FOLDER" in os.environ

needs_fake = pytest.mark.skipif(
    not IS_HERE, reason="needs the fake CUDA: make cuda-test"
)
needs_cuda = pytest.mark.skipif(
    not IS_HERE and os.environ.get("FSDP_C_TEST_DEVICE") != "cuda",
    reason="needs FSDP_C_TEST_DEVICE=cuda, or the fake CUDA: make cuda-test",
)

_loaded = ctypes.CDLL(None)  # it was loaded before the program


def set_schedule(seed: int, scale: float) -> None:
    """Draw delays anew; ``scale`` multiplies them, 0 ends them. A GPU has its own."""
    if not IS_HERE:
        return
    _loaded.fakecuda_set_schedule(ctypes.c_uint64(seed), ctypes.c_double(scale))


def schedules(count: int) -> Iterator[int]:
    """Yield seeds of delays, each when its delays hold."""
    for seed in range(count):
        set_schedule(seed, 1.0)
        yield seed


def on_device(body: Callable[[], None]) -> Callable[[], None]:
    """Run the body in a process whose default device is CUDA."""
    return distributed(world_size=1, device="cuda")(body)


def set_behind(value: bool) -> None:
    """Let the device of a rank that is alone be as far behind the host as it can."""
    _loaded.fakecuda_set_behind(ctypes.c_bool(value))


def set_memory(nbytes: int, device: int = 0) -> None:
    """Limit a device's memory; 0: to what it had."""
    _loaded.fakecuda_set_memory(device, ctypes.c_size_t(nbytes))


def count(name: str) -> int:
    """Return how often the runtime's calls of a kind (fake.h) were made."""
    _loaded.fakecuda_count.restype = ctypes.c_long
    found = int(_loaded.fakecuda_count(name.encode()))
    assert found >= 0, name
    return found


def num_collectives() -> int:
    """Return how many launches of collectives NCCL was asked for; a group is one."""
    _loaded.fake_nccl_num_launches.restype = ctypes.c_longlong
    return int(_loaded.fake_nccl_num_launches())


def forget_failure() -> None:
    """Let the device work again after a task failed."""
    _loaded.fakecuda_forget_failure()
