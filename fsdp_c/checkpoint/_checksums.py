"""CRC-32C of files, by blocks.

A file's checksums are those of its bytes [0, n), [n, 2n), ...: a reader of a few
byte ranges checks the blocks around them and reads nothing else.
"""

from collections.abc import Iterable

from fsdp_c._native import crc32c

BLOCK_NBYTES = 1 << 20


class BlockSums:
    """Checksums of a stream of bytes, block by block."""

    def __init__(self) -> None:
        self._open_nbytes = 0
        self._value = 0
        self._sums: list[int] = []

    def update(self, data: memoryview) -> None:
        """Add the next bytes."""
        begin = 0
        while begin < len(data):
            end = min(len(data), begin + BLOCK_NBYTES - self._open_nbytes)
            self._value = crc32c(data[begin:end], self._value)
            self._open_nbytes += end - begin
            begin = end
            if self._open_nbytes == BLOCK_NBYTES:
                self._close()

    def _close(self) -> None:
        self._sums.append(self._value)
        self._value, self._open_nbytes = 0, 0

    def finish(self) -> list[int]:
        """Return the checksums of all blocks; the last may be a short one."""
        if self._open_nbytes:
            self._close()
        return self._sums


def num_blocks(nbytes: int, block_nbytes: int) -> int:
    """Return how many blocks a file of ``nbytes`` has."""
    return -(-nbytes // block_nbytes)


def block_runs(
    ranges: Iterable[tuple[int, int]], nbytes: int, block_nbytes: int
) -> list[tuple[int, int]]:
    """Return the runs of whole blocks around byte ranges, ascending and disjoint.

    The half-open ``ranges`` come in any order, in a file of ``nbytes`` whose last block
    may be short.

    Example:
        >>> block_runs([(5, 9), (0, 2), (13, 14)], nbytes=18, block_nbytes=4)
        [(0, 16)]
    """
    runs: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if begin == end:
            continue
        first = begin // block_nbytes * block_nbytes
        last = min(num_blocks(end, block_nbytes) * block_nbytes, nbytes)
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
    return runs
