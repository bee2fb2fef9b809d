"""A worker process of `helpers.distributed`: one rank, many tests."""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib.util
import inspect
import marshal
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist

from helpers.distributed import Outcome, Task, WorkerConfig
from helpers.groups import kept_groups
from helpers.one_gpu import set_up_device
from helpers.seeds import seed_everything

_PR_SET_PDEATHSIG = 1
_MAX_GROUP_THREADS = 8


def _load(task: Task) -> types.ModuleType:
    """Make the test's module of the code that came with the task, once."""
    loaded = sys.modules.get(task.module)
    if loaded is not None and getattr(loaded, "__file__", None) == task.path:
        return loaded
    spec = importlib.util.spec_from_file_location(task.module, task.path)
    assert spec is not None, task.path
    module = importlib.util.module_from_spec(spec)
    sys.modules[task.module] = module
    try:
        exec(marshal.loads(task.code), vars(module))
    except BaseException:
        del sys.modules[task.module]
        raise
    gc.collect()
    gc.freeze()  # what was imported is not looked at again
    return module


def _find(module: types.ModuleType, qualname: str) -> Callable[..., None]:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part)
    return getattr(found, "distributed_body", found)


def call(body: Callable[..., None], arguments: dict[str, Any]) -> None:
    """Call ``body`` with those arguments that it names."""
    parameters = inspect.signature(body).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        body(**arguments)
    else:
        body(**{name: arguments[name] for name in parameters})


def _num_units(fsdp: type) -> int:
    """Return how many FSDP modules are alive after a collection.

    A device thread of autograd holds a backward that raised for a moment longer than
    the caller, so a second or two is given before any counts.
    """
    for _ in range(20):
        gc.collect()
        num_units = sum(issubclass(type(o), fsdp) for o in gc.get_objects())
        if num_units == 0:
            break
        time.sleep(0.1)
    return num_units


def _num_groups() -> int:
    """Return how many process groups there are that a test must destroy."""
    return len(dist.distributed_c10d._world.pg_map) - len(kept_groups)


def _num_group_threads() -> int:
    """Return how many threads serve gloo groups: those in use and destroyed ones.

    A destroyed group keeps its thread, which wakes a hundred times a second, as long as
    anything refers to the group: a cache of DTensor that knows its mesh, for example.
    """
    num_threads = 0
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended
            num_threads += name.read_text().startswith("gloo_tcp")
    return num_threads


def _forget_meshes() -> None:
    """Let DTensors forget what they found out about meshes whose groups are gone.

    They remember it by meshes, also for a later mesh that is equal but has new groups.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    caches = {
        "torch.distributed.tensor.debug": "_clear_sharding_prop_cache",
        "torch.distributed.tensor._redistribute": "clear_redistribute_planner_cache",
    }
    for name, function in caches.items():
        module = importlib.import_module(name)
        if hasattr(module, function):  # not in every version
            getattr(module, function)()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            _clear_caches(module)


def _clear_caches(module: types.ModuleType) -> None:
    """Clear the lru_caches around a module's functions and its classes' methods."""
    values = list(vars(module).values())
    for value in values.copy():
        if isinstance(value, type) and value.__module__ == module.__name__:
            values += [getattr(m, "__func__", m) for m in vars(value).values()]
    for value in values:
        if type(value) is functools._lru_cache_wrapper:
            value.cache_clear()


def _leftovers(num_groups: int) -> list[str]:
    """Name what a test must not leave behind."""
    gc.collect()
    left = []
    impl = sys.modules.get("helpers.impl")
    if impl is not None:
        num_units = _num_units(impl.FSDP)
        if num_units > 0:
            left.append(f"{num_units} FSDP modules are alive")
    if not torch.is_grad_enabled():
        left.append("gradients are disabled")
    if torch.get_default_dtype() != torch.float32:
        left.append(f"the default dtype is {torch.get_default_dtype()}")
    if torch.is_anomaly_enabled():
        left.append("anomaly mode is on")
    # torch's pool of backward threads has no Python threads: any is the test's.
    threads = [
        t.name for t in threading.enumerate() if t is not threading.main_thread()
    ]
    if threads:
        left.append(f"threads are running: {threads}")
    if sys.getprofile() is not None:
        left.append("a profile function is set")
    if _num_groups() != num_groups:
        left.append("process groups were not destroyed")
    return left


def _check_in_step(number: int) -> None:
    """Fail if the ranks' collectives are out of step after a test."""
    mine = torch.tensor([number], dtype=torch.int64, device="cpu")
    tokens = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(tokens, mine)
    values = [int(token) for token in tokens]
    if any(value != number for value in values):
        msg = f"collectives are out of step after the test: {values} != {number}"
        raise AssertionError(msg)


def _run(task: Task, rank: int) -> Outcome:
    try:
        module = _load(task)
        body = _find(module, task.qualname)
        arguments = pickle.loads(task.arguments)
    except pytest.skip.Exception as error:
        return Outcome("skipped", str(error))
    except BaseException:
        return Outcome("failed", traceback.format_exc())
    seed_everything(task.seed)
    num_groups = _num_groups()
    num_made = dist.distributed_c10d._world.group_count
    outcome = Outcome("passed")
    try:
        call(body, {"rank": rank, **arguments})
    except pytest.skip.Exception as error:
        outcome = Outcome("skipped", str(error))
    except pytest.xfail.Exception as error:
        outcome = Outcome("xfailed", str(error))
    except BaseException:
        return Outcome("failed", traceback.format_exc(), keeps_pool=False)
    for argument in arguments.values():
        if isinstance(argument, pytest.MonkeyPatch):
            argument.undo()  # pytest undoes its own, in another process
    if dist.distributed_c10d._world.group_count > num_made:
        _forget_meshes()
    try:
        left = _leftovers(num_groups)
        if left:
            message = "left over after the test: " + "; ".join(left)
            return Outcome("failed", message, keeps_pool=False)
        _check_in_step(task.number)
    except BaseException:
        return Outcome("failed", traceback.format_exc(), keeps_pool=False)
    if _num_group_threads() > _MAX_GROUP_THREADS:
        return replace(outcome, keeps_pool=False)
    return outcome


def _take_over(config: WorkerConfig) -> None:
    """Make this fork what a process started for one rank would be."""
    os.setsid()
    # A parent that is killed takes its workers along.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(config.env)
    sys.path[:] = list(dict.fromkeys(config.path))
    with config.stderr.open("wb") as stderr:
        os.dup2(stderr.fileno(), sys.stdout.fileno())
        os.dup2(stderr.fileno(), sys.stderr.fileno())


def _show_stacks(stacks: IO[str]) -> None:
    """Let crashes and SIGUSR1 show stacks, also where a test has reset its signals.

    Lightning's Trainer ends by setting all handlers that it saw, which C's are not.
    """
    faulthandler.disable()
    faulthandler.enable()
    faulthandler.unregister(signal.SIGUSR1)
    # Chained to the signal's default: who has written its stacks ends.
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True, chain=True)


def _be_harsh() -> None:
    """Collect garbage all the time, change threads, and fill new memory with NaN."""
    gc.set_threshold(25, 2, 2)
    sys.setswitchinterval(1e-6)
    torch.use_deterministic_algorithms(True)  # and so torch.empty() is filled


def main(config: WorkerConfig, connection: Connection) -> None:
    """Serve tests until the parent says stop or goes away."""
    _take_over(config)
    torch.set_num_threads(1)
    if os.environ.get("FSDP_C_TEST_HARSH") == "1":
        _be_harsh()
    with config.stacks.open("w") as stacks:
        _show_stacks(stacks)
        backend = set_up_device(config.device, config.rank, config.world_size)
        dist.init_process_group(
            backend,
            store=dist.FileStore(config.store, config.world_size),  # type: ignore[attr-defined]
            rank=config.rank,
            world_size=config.world_size,
            timeout=timedelta(minutes=10),
        )
        try:
            _check_in_step(0)
            connection.send(Outcome("passed"))
        except BaseException:
            connection.send(Outcome("failed", traceback.format_exc()))
        while True:
            try:
                task = connection.recv()
            except EOFError:
                break
            if task is None:
                break
            _show_stacks(stacks)
            connection.send(_run(task, config.rank))
        faulthandler.unregister(signal.SIGUSR1)
        if dist.is_initialized():
            dist.destroy_process_group()
