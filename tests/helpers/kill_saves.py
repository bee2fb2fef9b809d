"""Saves that are killed, over and over; what is on disk is checked after each.

    python -m helpers.kill_saves <folder> <number of kills> <seed>
    python -m helpers.kill_saves <folder> sweep <stride>

The ranks are forked from this process, which has imported torch but has neither
threads nor process groups, so a kill costs no start of Python. A model's parameters
all hold the number of the save, so a load tells what it got. ``sweep`` kills a
single rank before its first, second, ... system call that changes the disk, or
before every third one, each time from another on.
"""

import itertools
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_c import FSDP, checkpoint
from fsdp_c.checkpoint import _folders
from helpers.distributed import TEST_DEVICE
from helpers.one_gpu import set_up_device

WORLD_SIZE = 2
LONGEST_S = 20.0
CALLS = ("open", "mkdir", "writev", "fsync", "rename", "unlink", "rmdir")


def _fork(body: Callable[[], None]) -> int:
    """Run ``body`` in a child; return its process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def _wait(child: int) -> int:
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"a rank did not end within {LONGEST_S} s")


def _model(world_size: int) -> Any:
    # With two ranks, several blocks of checksums each: something to tear.
    rows = 1024 if world_size > 1 else 8
    return FSDP(nn.Linear(512, rows, bias=False), use_orig_params=True)


def _fill(model: Any, number: int) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(number)


def _check(path: Path, model: Any) -> int:
    """Load ``path``; return which save it is."""
    number: int = checkpoint.load(path, model).extra
    for param in model.parameters():
        assert (param == number).all(), f"save {number} holds other values"
    return number


def _rank(rank: int, world_size: int, path: Path, body: Callable[[Any], None]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.HashStore() if world_size == 1 else dist.FileStore(str(path))
    backend = set_up_device(TEST_DEVICE, rank, world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    body(_model(world_size))


def _saves(path: Path, first: int, ready: int) -> Callable[[Any], None]:
    """Return a body that checks ``path`` and saves to it until it is killed."""

    def body(model: Any) -> None:
        if checkpoint_exists(path):
            assert _check(path, model) < first
        dist.barrier()
        os.write(ready, b"x")
        for number in itertools.count(first):
            _fill(model, number)
            is_async = number % 3 == 0
            checkpoint.save(
                path, model, extra=number, blocking=not is_async, timeout=1.0
            ).result()

    return body


def checkpoint_exists(path: Path) -> bool:
    """Return whether there is something to load, as a reader finds it."""
    return Path(_folders.resolve(path)).is_dir()


def _kill_once(path: Path, store: Path, first: int, numbers: random.Random) -> None:
    """Start two ranks that save; kill both, or one, after a random time."""
    read, write = os.pipe()
    saves = _saves(path, first, write)
    children = [
        _fork(partial(_rank, rank, WORLD_SIZE, store, saves))
        for rank in range(WORLD_SIZE)
    ]
    os.close(write)
    for _ in children:
        assert os.read(read, 1) == b"x", "a rank failed before it saved"
    os.close(read)
    time.sleep(numbers.random() * 0.06)
    for child in numbers.choice([children, children[:1], children[1:]]):
        os.kill(child, signal.SIGKILL)
    for child in children:
        assert _wait(child) != 0, "it saves until it is killed"


def kill_at_random(folder: Path, num_kills: int, seed: int) -> None:
    """Kill saves at random moments; check what is there after each."""
    numbers = random.Random(seed)
    first = 1
    for kill in range(num_kills):
        # Over an existing checkpoint, or to a new path.
        path = folder / ("same" if kill % 3 else f"new-{kill}")
        existed = checkpoint_exists(path)
        _kill_once(path, folder.parent / f"store-{kill}", first, numbers)
        if checkpoint_exists(path):
            found = checkpoint.verify(path).manifest.extra
            assert isinstance(found, int)
            first = max(first, found)
        else:
            assert not existed, f"kill {kill}: the checkpoint at {path} is gone"
        first += 1
    _end(folder, first)


def _end(folder: Path, number: int) -> None:
    """Save once more: what killed saves left is gone, nothing else is."""

    def body(model: Any) -> None:
        _fill(model, number)
        checkpoint.save(folder / "last", model, extra=number)
        assert _check(folder / "last", model) == number

    assert _wait(_fork(lambda: _rank(0, 1, folder.parent / "store-end", body))) == 0
    left = [name for name in os.listdir(folder) if name.startswith(".")]
    assert not left, f"left over: {left}"
    for each in folder.iterdir():
        checkpoint.verify(each)


class _Bomb:
    """Kills this process before its n-th call that changes the disk."""

    def __init__(self, number: int) -> None:
        self.left = number
        for name in CALLS:
            setattr(os, name, self._counting(getattr(os, name)))
        _folders.swap_names = self._counting(_folders.swap_names)

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return function(*arguments, **kwargs)

        return call


def _sweep_path(path: Path, calls: range, *, can_swap: bool, existed: bool) -> int:
    """Kill saves to ``path`` before these calls; return the first that is none."""

    def save(number: int, bomb: int | None, model: Any) -> None:
        _fill(model, number)
        if not can_swap:
            _folders.swap_names = lambda *_: False
        if bomb is not None:
            _Bomb(bomb)
        checkpoint.save(path, model, extra=number)

    def in_child(number: int, bomb: int | None) -> int:
        return _wait(_fork(partial(_rank, 0, 1, path, partial(save, number, bomb))))

    known = 0
    if existed:
        assert in_child(known, None) == 0
    for bomb in calls:
        if not existed:
            shutil.rmtree(path, ignore_errors=True)
        status = in_child(bomb + 1, bomb)
        is_there = checkpoint_exists(path)
        assert is_there or not existed, f"call {bomb}: the old one is gone"
        if is_there:
            found = checkpoint.verify(path).manifest.extra
            assert found in ((known, bomb + 1) if existed else (bomb + 1,))
            known = found
        if status == 0:
            assert is_there
            assert known == bomb + 1
            return bomb
        assert status == -signal.SIGKILL, status
    raise AssertionError("every kill leaves something that the next save handles")


def sweep(folder: Path, stride: int) -> None:
    """Kill before the calls; with and without a swap of names, old and new."""
    kinds = ((True, False), (True, True), (False, True))
    counts = [
        _sweep_path(
            folder / f"{'swap' if can_swap else 'two'}-{existed}",
            range(first % stride, 200, stride),
            can_swap=can_swap,
            existed=existed,
        )
        for first, (can_swap, existed) in enumerate(kinds)
    ]
    assert min(counts) > 10, counts
    _end(folder, 10_000)
    print("calls of a save:", counts)


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    folder = Path(words[0]) / "checkpoints"
    folder.mkdir()
    if words[1] == "sweep":
        sweep(folder, int(words[2]))
    else:
        kill_at_random(folder, int(words[1]), int(words[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
