"""The accelerator of the tests of streams: the fake CUDA, else the simulated device."""

import os
from typing import Any

import pytest
import torch

ACCELERATOR = "cuda" if "FAKE_CUDA_FOLDER" in os.environ else "sim"

needs_exact_memory = pytest.mark.skipif(
    ACCELERATOR == "cuda", reason="torch's allocator keeps whole segments of 2 MiB"
)


class _FakeCuda:
    """What `simdevice.device.native` offers, of torch's CUDA."""

    Graph = staticmethod(torch.cuda.CUDAGraph)

    def set_schedule(self, seed: int, scale: float) -> None:
        from fakecuda.device import set_schedule

        set_schedule(seed, scale)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def set_memory_limit(self, nbytes: int) -> None:
        from fakecuda.device import set_memory

        set_memory(nbytes)

    def memory_stats(self) -> dict[str, int]:
        stats = torch.cuda.memory_stats()
        return {
            "live_nbytes": stats.get("allocated_bytes.all.current", 0),
            "peak_nbytes": stats.get("allocated_bytes.all.peak", 0),
            "held_nbytes": stats.get("reserved_bytes.all.current", 0),
            "num_allocs": stats.get("allocation.all.allocated", 0),
        }


def native() -> Any:
    """Return the accelerator's own functions."""
    if ACCELERATOR == "cuda":
        return _FakeCuda()
    from simdevice.device import native as of_the_simulated_one

    return of_the_simulated_one()
