"""Exact bytes of live CPU tensor memory over time.

memory_count.c, loaded before libc, logs every allocation and free of torch's CPU
allocator on every thread: autograd, the optimizer, c10d's gloo threads, and fsdp_c's
arena, which uses the same allocator. The sum over the log is what is live. Memory from
elsewhere is not seen: gloo's own staging buffers, Python objects, code.

torch.profiler(profile_memory=True) misses what a gloo thread frees, because that thread
does not carry the profiler, and counts such memory forever.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

REST = "rest"


@dataclass
class _Allocation:
    """One stretch of memory from its allocation to its free."""

    nbytes: int
    kind: str = REST


@dataclass
class Peak:
    """The moment of a phase at which most bytes were live.

    ``by_kind`` splits ``nbytes``; ``at_begin`` has an item for each recurrence.
    """

    nbytes: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    at_begin: list[int] = field(default_factory=list)


def build_counter(folder: Path) -> Path:
    """Compile memory_count.c into ``folder``; return what LD_PRELOAD must name.

    Raises:
        RuntimeError: There is no C compiler, or it failed.
    """
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        raise RuntimeError("the memory benchmark needs gcc, or CC naming a C compiler")
    source = Path(__file__).with_name("memory_count.c")
    library = folder / "memory_count.so"
    command = [compiler, "-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread"]
    done = subprocess.run(
        [*command, str(source), "-o", str(library)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{source.name} does not compile:\n{done.stderr}")
    return library


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return address and bytes of each storage of ``tensors``, DTensors' local ones."""
    found = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        if storage.nbytes() > 0:
            found[storage.data_ptr()] = storage.nbytes()
    return found


class MemoryTrace:
    """Puts phases and kinds of memory into the log, and analyses it."""

    def __init__(self) -> None:
        """Find the log of this process.

        Raises:
            RuntimeError: The process was started without memory_count.c.
        """
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "memory_count_mark"):
            raise RuntimeError("this process was started without memory_count.so")
        self._library.memory_count_entries.restype = ctypes.c_void_p
        self._library.memory_count_num_entries.restype = ctypes.c_int64
        self._library.memory_count_max_entries.restype = ctypes.c_int64
        # Of each mark: the phase that begins, or a kind and its storages.
        self._marks: list[str | tuple[str, dict[int, int]]] = []

    def _mark(self, what: str | tuple[str, dict[int, int]]) -> None:
        self._library.memory_count_mark(ctypes.c_int64(len(self._marks)))
        self._marks.append(what)

    def begin(self, phase: str) -> None:
        """Begin a phase; it lasts until the next one. Phases may recur."""
        self._mark(phase)

    def tag(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Say what kind of memory these live tensors are, from birth to free."""
        self._mark((kind, storages(tensors)))

    def _entries(self) -> list[tuple[int, int]]:
        num_entries = self._library.memory_count_num_entries()
        if num_entries > self._library.memory_count_max_entries():
            raise RuntimeError("the log of allocations is full: run fewer steps")
        numbers = (ctypes.c_int64 * (2 * num_entries)).from_address(
            self._library.memory_count_entries()
        )
        flat = list(numbers)
        return list(zip(flat[::2], flat[1::2], strict=True))

    def peaks(self) -> dict[str, Peak]:
        """Return the peak of each phase, over all its recurrences."""
        live: dict[int, _Allocation] = {}
        timeline: list[tuple[str | _Allocation, int]] = []
        for value, nbytes in self._entries():
            if nbytes > 0:
                live[value] = _Allocation(nbytes)
                timeline.append((live[value], 1))
            elif nbytes < 0:
                timeline.append((live.pop(value), -1))
            else:
                mark = self._marks[value]
                if isinstance(mark, str):
                    timeline.append((mark, 0))
                    continue
                kind, found = mark
                for address, size in found.items():
                    for begin, allocation in live.items():
                        # Shards lie anywhere in the pages of a unit's.
                        if (
                            begin < address + size
                            and address < begin + allocation.nbytes
                        ):
                            allocation.kind = kind

        peaks: dict[str, Peak] = {}
        by_kind: dict[str, int] = {}
        total = 0
        peak = Peak()
        for item, sign in timeline:
            if isinstance(item, str):
                peak = peaks.setdefault(item, Peak())
                peak.at_begin.append(total)
            else:
                total += sign * item.nbytes
                by_kind[item.kind] = by_kind.get(item.kind, 0) + sign * item.nbytes
            if total > peak.nbytes:
                peak.nbytes, peak.by_kind = total, dict(by_kind)
        return peaks
