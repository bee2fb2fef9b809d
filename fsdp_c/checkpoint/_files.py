"""Rank files: written in one pass from memory, read by byte ranges.

Note [No file outside the folder]
Names of files are computed from ranks, never taken from a document. Files are opened
relative to a descriptor of the folder, must be regular files and not links, so a
checkpoint that is replaced meanwhile cannot be mixed with its successor, and none can
point elsewhere.
"""

import ctypes
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fsdp_c._native import crc32c
from fsdp_c.checkpoint._checksums import BLOCK_NBYTES, BlockSums, block_runs
from fsdp_c.checkpoint._dtypes import dtype_name
from fsdp_c.checkpoint._memory import bytes_of, on_host
from fsdp_c.checkpoint._rank_entry import Piece
from fsdp_c.checkpoint._safetensors import make_header

Advance = Callable[[int], object]
"""Called with the number of bytes done since the last call."""

_MAX_BUFFERS = 512  # of one write, below IOV_MAX
_WRITE_NBYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2
_READ_NBYTES = 4 << 20


def rank_file(rank: int, world_size: int) -> str:
    """Return the name of a rank's tensors."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def entry_file(rank: int, world_size: int) -> str:
    """Return the name of a rank's entry."""
    return f"rank-{rank:05d}-of-{world_size:05d}.json"


# Write ----------------------------------------------------------------------


class FileItem(NamedTuple):
    """A tensor to write: elements ``[begin, begin + numel)`` of a flattened one."""

    key: str
    begin: int
    tensor: Tensor


class Written(NamedTuple):
    """What :func:`write_items` wrote."""

    nbytes: int
    checksums: list[int]
    pieces: dict[str, Piece]


def write_items(
    path: str, items: Sequence[FileItem], *, save_id: str, advance: Advance
) -> Written:
    """Write a rank's file, new and synced, straight from the tensors' memory.

    Tensors on a device come to the host one at a time. The header has ``save_id``.

    Raises:
        ValueError: Two tensors have one key.
        OSError: The file exists, or cannot be written.
    """
    header, places = make_header(
        (
            (key, dtype_name(tensor.dtype, key), tuple(tensor.shape))
            for key, _, tensor in items
        ),
        {"format": "pt", "save_id": save_id},
    )
    sums = BlockSums()
    with new_file(path) as descriptor:
        nbytes = write_all(descriptor, _chunks(header, items), sums.update, advance)
    pieces = {
        key: Piece(places[key].dtype, begin, begin + tensor.numel(), places[key].begin)
        for key, begin, tensor in items
    }
    return Written(nbytes, sums.finish(), pieces)


def _chunks(header: bytes, items: Sequence[FileItem]) -> Iterator[memoryview]:
    yield memoryview(header)
    for item in items:
        yield bytes_of(on_host(item.tensor))


@contextmanager
def new_file(path: str | Path) -> Iterator[int]:
    """Yield the descriptor of a new file; sync and close it at the end."""
    with open(path, "xb", buffering=0) as file:
        yield file.fileno()
        os.fsync(file.fileno())


def write_all(
    descriptor: int,
    chunks: Iterable[memoryview],
    update: Callable[[memoryview], object],
    advance: Advance,
) -> int:
    """Write chunks of bytes, in few large writes; return how many bytes.

    ``update`` is called with all bytes, in order, before they are written.
    """
    batch: list[memoryview] = []
    batch_nbytes = 0
    nbytes = 0
    for chunk in chunks:
        for begin in range(0, len(chunk), _WRITE_NBYTES):
            part = chunk[begin : begin + _WRITE_NBYTES]
            update(part)
            batch.append(part)
            batch_nbytes += len(part)
            nbytes += len(part)
            if batch_nbytes >= _WRITE_NBYTES or len(batch) == _MAX_BUFFERS:
                _write_batch(descriptor, batch)
                _begin_sync(descriptor, nbytes - batch_nbytes, batch_nbytes)
                advance(batch_nbytes)
                batch, batch_nbytes = [], 0
    _write_batch(descriptor, batch)
    advance(batch_nbytes)
    return nbytes


def _write_batch(descriptor: int, batch: list[memoryview]) -> None:
    while batch:
        done = os.writev(descriptor, batch)
        while batch and done >= len(batch[0]):
            done -= len(batch.pop(0))
        if done:
            batch[0] = batch[0][done:]


def _begin_sync(descriptor: int, offset: int, nbytes: int) -> None:
    """Let the disk begin with what was written, while the next bytes are prepared.

    It makes a save up to a third faster. Where the system cannot do it, fsync writes
    everything at the end.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def _find_sync_file_range() -> Callable[[int, int, int, int], object] | None:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    found: Callable[[int, int, int, int], object] = function
    return found


_sync_file_range = _find_sync_file_range()


def write_document(path: str | Path, data: bytes) -> None:
    """Write a new small file and sync it."""
    with new_file(path) as descriptor:
        _write_batch(descriptor, [memoryview(data)])


@contextmanager
def _open_folder(path: str) -> Iterator[int]:
    """Yield a descriptor of a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    with _open_folder(path) as descriptor:
        os.fsync(descriptor)


def rename_durably(old: str, new: str) -> None:
    """Rename a file within its folder, whose names are durable then.

    Whoever sees the new name may move the folder at once.
    """
    with _open_folder(os.path.dirname(new)) as descriptor:
        os.rename(old, new)
        os.fsync(descriptor)


# Read -----------------------------------------------------------------------


class Folder:
    """An open folder; files are opened in it, see Note [No file outside the folder].

    They may be links only if it ``follows_links``.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: str, follows_links: bool = False) -> None:
        self.path = path
        self._flags = os.O_RDONLY | os.O_NONBLOCK
        if not follows_links:
            self._flags |= os.O_NOFOLLOW
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)

    def names(self) -> list[str]:
        """Return the names in the folder, sorted."""
        return sorted(os.listdir(self._descriptor))

    @contextmanager
    def open(self, name: str) -> Iterator[int]:
        """Yield a descriptor of the regular file ``name``.

        Raises:
            OSError: It is not there, or no regular file.
        """
        assert os.path.basename(name) == name
        descriptor = os.open(name, self._flags, dir_fd=self._descriptor)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{name} is not a regular file")
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, name: str, max_nbytes: int) -> bytes:
        """Return all bytes of a file.

        Raises:
            OSError: It cannot be read.
            ValueError: It is larger than ``max_nbytes``.
        """
        with self.open(name) as descriptor:
            nbytes = os.fstat(descriptor).st_size
            if nbytes > max_nbytes:
                raise ValueError(
                    f"it has {nbytes} bytes, and at most {max_nbytes} are read"
                )
            data = bytearray(nbytes)
            read_into(descriptor, 0, memoryview(data))
            return bytes(data)


def read_into(descriptor: int, offset: int, target: memoryview) -> None:
    """Fill ``target`` with the bytes of a file from ``offset`` on.

    Raises:
        ValueError: The file ends before.
        OSError: It cannot be read.
    """
    done = 0
    while done < len(target):
        num = os.preadv(descriptor, [target[done:]], offset + done)
        if num == 0:
            raise ValueError(f"it ends after {offset + done} bytes")
        done += num


def bad_blocks(
    descriptor: int,
    ranges: Iterable[tuple[int, int]],
    nbytes: int,
    checksums: Sequence[int],
    advance: Advance,
) -> list[tuple[int, int]]:
    """Read the blocks around byte ranges; return those whose checksum is wrong.

    ``ranges`` are half-open; ``nbytes`` and ``checksums`` are those of the whole file.
    Needs 4 MiB of memory, whatever the ranges.
    """
    buffer = memoryview(bytearray(_READ_NBYTES))
    bad = []
    for run_begin, run_end in block_runs(ranges, nbytes, BLOCK_NBYTES):
        for begin in range(run_begin, run_end, _READ_NBYTES):
            part = buffer[: min(_READ_NBYTES, run_end - begin)]
            read_into(descriptor, begin, part)
            for offset in range(0, len(part), BLOCK_NBYTES):
                block = part[offset : offset + BLOCK_NBYTES]
                if crc32c(block) != checksums[(begin + offset) // BLOCK_NBYTES]:
                    bad.append((begin + offset, begin + offset + len(block)))
            advance(len(part))
    return bad
