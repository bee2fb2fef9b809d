"""A checkpoint that is read: its manifest, and of its ranks only what is needed."""

import os
from collections.abc import Iterable

import torch
from torch import Tensor

from fsdp_c.checkpoint import _documents
from fsdp_c.checkpoint._dtypes import dtype_named
from fsdp_c.checkpoint._errors import CheckpointError, reason
from fsdp_c.checkpoint._files import (
    Advance,
    Folder,
    bad_blocks,
    entry_file,
    rank_file,
    read_into,
)
from fsdp_c.checkpoint._folders import resolve
from fsdp_c.checkpoint._holders import Holders
from fsdp_c.checkpoint._manifest import MANIFEST, Manifest, parse_manifest
from fsdp_c.checkpoint._memory import bytes_of
from fsdp_c.checkpoint._rank_entry import RankEntry, parse_rank_entry
from fsdp_c.checkpoint._reads import FileReads


class RankSource:
    """One rank's entry and file, checked as far as they are read."""

    def __init__(self, folder: Folder, entry: RankEntry, name: str) -> None:
        self.entry = entry
        self.name = name
        self.reads = FileReads(folder, name)
        self._folder = folder
        self._wanted: list[tuple[int, int, str]] = []

    def want(self, begin: int, end: int, what: str) -> None:
        """Plan to check bytes ``[begin, end)``, which are part of ``what``."""
        self._wanted.append((begin, end, what))

    def want_tensor(self, key: str) -> None:
        """Plan to check a tensor, for :meth:`tensor`."""
        piece = self.entry.pieces.get(key)
        if piece is not None:
            self.want(piece.offset, piece.offset + piece.nbytes, repr(key))

    @property
    def nbytes(self) -> int:
        """Bytes that are planned to be checked."""
        return sum(end - begin for begin, end, _ in self._ranges())

    def _ranges(self) -> list[tuple[int, int, str]]:
        return self._wanted + [(r.begin, r.end, r.what) for r in self.reads.reads]

    def check(self, advance: Advance) -> list[str]:
        """Check the file's size, header, and all blocks that are needed.

        Returns:
            What is wrong, as sentences.
        """
        ranges = self._ranges()
        expected = self.entry.nbytes
        try:
            with self._folder.open(self.name) as descriptor:
                nbytes = os.fstat(descriptor).st_size
                if nbytes != expected:
                    kind = "truncated" if nbytes < expected else "too long"
                    return [
                        f"{self.name} is {kind}: it has {nbytes} bytes, {expected} "
                        f"were written; it holds {_names(ranges)}"
                    ]
                problems = [
                    f"{self.name}: {difference}"
                    for difference in self.entry.differences(
                        self.reads.read_header(descriptor)
                    )
                ]
                bad = bad_blocks(
                    descriptor,
                    [(begin, end) for begin, end, _ in ranges],
                    nbytes,
                    self.entry.checksums,
                    advance,
                )
        except (OSError, ValueError) as error:
            return [
                f"{self.name} cannot be read: {reason(error)}; it holds "
                f"{_names(ranges)}"
            ]
        for bad_begin, bad_end in bad:
            hit = [each for each in ranges if each[0] < bad_end and bad_begin < each[1]]
            problems.append(
                f"{self.name} is corrupted between bytes {bad_begin} and {bad_end}, "
                f"in {_names(hit)}"
            )
        return problems

    def tensor(self, key: str) -> Tensor:
        """Return a tensor that was checked, in new memory.

        Raises:
            ValueError: The file has none, or it was not checked.
        """
        piece, info = self.entry.pieces.get(key), self.reads.tensors.get(key)
        if piece is None or info is None:
            raise ValueError(f"{self.name} has no tensor {key!r:.80}")
        result = torch.empty(info.shape, dtype=dtype_named(info.dtype), device="cpu")
        with self.reads.unchanged() as descriptor:
            read_into(descriptor, info.begin, bytes_of(result))
        return result


def _names(ranges: Iterable[tuple[int, int, str]]) -> str:
    return ", ".join(dict.fromkeys(name for _, _, name in ranges)) or "nothing needed"


class Source:
    """An open checkpoint.

    Raises:
        CheckpointError: There is none at ``path``, or its manifest is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = resolve(path)
        headline = f"there is no checkpoint that can be used in {self.path}"
        try:
            self._folder = Folder(self.path)
        except OSError as error:
            raise CheckpointError(headline, [reason(error)]) from None
        try:
            data = self._folder.read(MANIFEST, _documents.MAX_NBYTES)
            self.manifest: Manifest = parse_manifest(data)
        except (OSError, ValueError) as error:
            problem = f"{MANIFEST}: {reason(error)}"
            if isinstance(error, FileNotFoundError):
                problem = (
                    f"it has no {MANIFEST}: its save did not finish, or it is not a "
                    "checkpoint"
                )
            self._folder.close()
            raise CheckpointError(headline, [problem]) from None
        self.holders = Holders(self.manifest)
        self.ranks: dict[int, RankSource] = {}
        self.problems: list[str] = []
        self._broken: set[int] = set()

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.close()

    def names(self) -> list[str]:
        """Return the names of all files in the folder."""
        return self._folder.names()

    def rank(self, rank: int) -> RankSource | None:
        """Return a rank's source; None, and a problem the first time, if damaged."""
        if rank in self._broken:
            return None
        if rank not in self.ranks:
            name = entry_file(rank, self.manifest.world_size)
            try:
                data = self._folder.read(name, _documents.MAX_NBYTES)
                entry = parse_rank_entry(data, save_id=self.manifest.save_id, rank=rank)
            except (OSError, ValueError) as error:
                self._broken.add(rank)
                self.problems.append(f"{name}: {reason(error)}")
                return None
            self.ranks[rank] = RankSource(
                self._folder, entry, rank_file(rank, self.manifest.world_size)
            )
        return self.ranks[rank]

    @property
    def nbytes(self) -> int:
        """Bytes that are planned to be checked."""
        return sum(source.nbytes for source in self.ranks.values())

    @property
    def read_nbytes(self) -> int:
        """Bytes that are planned to be read into place."""
        return sum(source.reads.nbytes for source in self.ranks.values())

    def check(self, advance: Advance) -> list[str]:
        """Check all files as far as they are needed; return all problems so far."""
        for source in self.ranks.values():
            self.problems += source.check(advance)
        return self.problems

    def run(self, advance: Advance) -> None:
        """Make all reads that were planned and checked."""
        for source in self.ranks.values():
            source.reads.run(advance)
