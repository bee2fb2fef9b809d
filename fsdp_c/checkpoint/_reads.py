"""Reads from one safetensors file: planned first, made when all is checked."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_c.checkpoint._errors import CheckpointError
from fsdp_c.checkpoint._files import Advance, Folder, read_into
from fsdp_c.checkpoint._memory import bytes_of, is_direct
from fsdp_c.checkpoint._safetensors import FileTensor, read_header

_CHUNK_NBYTES = 8 << 20


class Read(NamedTuple):
    """Bytes ``[begin, end)`` of a file, elements of one dtype."""

    what: str  # their name in messages
    begin: int
    end: int
    dtype: torch.dtype  # of the elements in the file
    target: Tensor  # 1-D, of as many elements; of another dtype they are cast


class FileReads:
    """The reads from one file.

    Attributes:
        name: Of the file.
        reads: Those planned.
        tensors: What the header says, once it was read.
        metadata: Likewise.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self.name = name
        self.reads: list[Read] = []
        self.tensors: dict[str, FileTensor] = {}
        self.metadata: dict[str, str] = {}
        self._folder = folder
        self._identity: tuple[int, ...] | None = None

    def read_header(self, descriptor: int) -> dict[str, FileTensor]:
        """Return the tensors of the open file; from now on it must not change.

        Raises:
            ValueError: It is damaged.
            OSError: It cannot be read.
        """
        self._identity = _identity(descriptor)
        self.tensors, self.metadata = read_header(descriptor)
        return self.tensors

    @contextmanager
    def unchanged(self) -> Iterator[int]:
        """Yield a descriptor of the file whose header was read.

        Raises:
            CheckpointError: It changed since.
            OSError: It cannot be opened.
        """
        with self._folder.open(self.name) as descriptor:
            if _identity(descriptor) != self._identity:
                raise CheckpointError(f"{self.name} changed while it was being read")
            yield descriptor

    @property
    def nbytes(self) -> int:
        """Bytes that are planned to be read."""
        return sum(read.end - read.begin for read in self.reads)

    def run(self, advance: Advance) -> None:
        """Make all reads, straight into host memory where it can be.

        Raises:
            CheckpointError: The file changed since its header was read.
            OSError: It cannot be read.
        """
        if not self.reads:
            return
        with self.unchanged() as descriptor:
            for read in sorted(self.reads, key=lambda read: read.begin):
                if is_direct(read.target) and read.target.dtype == read.dtype:
                    read_into(descriptor, read.begin, bytes_of(read.target))
                else:
                    _read_through(descriptor, read)
                advance(read.end - read.begin)

    def chunks(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yield bytes ``[begin, end)`` in chunks of new memory, of whole elements."""
        with self.unchanged() as descriptor:
            for offset in range(begin, end, _CHUNK_NBYTES):
                data = memoryview(bytearray(min(_CHUNK_NBYTES, end - offset)))
                read_into(descriptor, offset, data)
                yield data


def _read_through(descriptor: int, read: Read) -> None:
    """Read by a buffer of 8 MiB: to a device, into strided memory, or with a cast."""
    itemsize = read.dtype.itemsize
    numel = read.target.numel()
    step = _CHUNK_NBYTES // itemsize
    buffer = torch.empty(min(step, numel), dtype=read.dtype, device="cpu")
    for first in range(0, numel, step):
        part = buffer[: min(step, numel - first)]
        read_into(descriptor, read.begin + first * itemsize, bytes_of(part))
        read.target[first : first + part.numel()].copy_(part)


def _identity(descriptor: int) -> tuple[int, ...]:
    """Return what changes when a file is replaced, cut off or written to."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
