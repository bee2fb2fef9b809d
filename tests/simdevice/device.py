"""Gives this process the device "sim" and the c10d backends "simccl" and "simgloo".

    load()
    x = torch.ones(3, device="sim")
    dist.init_process_group("cpu:gloo,sim:simccl", ...)

Environment: SIM_SEED and SIM_DELAY, the seed and the scale of the delays.
"""

import contextlib
import ctypes
import functools
import importlib.util
import types
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from simdevice.build import build

_native: Any = None


def load() -> Any:
    """Build and register the device; return its native module."""
    global _native
    if _native is not None:
        return _native
    folder = build()
    # Global, so that a fake libnccl finds the streams.
    ctypes.CDLL(str(folder / "libsimcore.so"), mode=ctypes.RTLD_GLOBAL)
    spec = importlib.util.spec_from_file_location(
        "_sim_native", folder / "_sim_native.so"
    )
    assert spec is not None
    assert spec.loader is not None
    _native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_native)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _device_module())
    torch.utils.generate_methods_for_privateuse1_backend()
    # torch's ShardedTensor asks so, and makes it a device of the accelerator.
    torch.cuda.current_device = lambda: 0
    for name in ("simccl", "simgloo"):
        make = functools.partial(_make_backend, name)
        dist.Backend.register_backend(name, make, devices=["sim"])
    return _native


def native() -> Any:
    """Return the native module of a device that was loaded."""
    assert _native is not None, "simdevice.device.load() comes first"
    return _native


def _device_module() -> types.ModuleType:
    module = types.ModuleType("torch.sim")
    members: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),  # there is one
        "synchronize": lambda device=None: native().synchronize(),
        "empty_cache": lambda: native().empty_cache(),
        "memory_allocated": lambda device=None: native().memory_stats()["live_nbytes"],
        "max_memory_allocated": lambda device=None: native().memory_stats()[
            "peak_nbytes"
        ],
        # A torch.Stream is a context of its own.
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "Stream": lambda *args, **kwargs: torch.Stream("sim", *args, **kwargs),
        "Event": lambda *args, **kwargs: torch.Event("sim", *args, **kwargs),
        "CUDAGraph": lambda: native().Graph(),
        "manual_seed_all": lambda seed: None,  # the CPU's generator
        "manual_seed": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    vars(module).update(members)
    return module


def _make_backend(
    name: str, store: Any, rank: int, world_size: int, timeout: timedelta
) -> dist.distributed_c10d.Backend:
    gloo = dist.ProcessGroupGloo(
        dist.PrefixStore(name, store), rank, world_size, timeout=timeout
    )
    return native().make_backend(gloo, name == "simgloo")
