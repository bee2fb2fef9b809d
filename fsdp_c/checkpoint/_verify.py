"""verify: every file of a checkpoint is there, whole, and as the manifest says."""

import os
from dataclasses import dataclass

from fsdp_c import _native
from fsdp_c._text import table
from fsdp_c.checkpoint._errors import CheckpointError
from fsdp_c.checkpoint._files import entry_file, rank_file
from fsdp_c.checkpoint._folders import OURS
from fsdp_c.checkpoint._manifest import MANIFEST, Manifest, TensorSpec, WholeSpec
from fsdp_c.checkpoint._progress import progress as progress_bar
from fsdp_c.checkpoint._rank_entry import model_key, state_key
from fsdp_c.checkpoint._source import RankSource, Source

Expected = dict[str, tuple[str, int, int]]
"""(dtype, begin, end) by key."""


@dataclass(frozen=True)
class Info:
    """A checkpoint in numbers. ``print()`` shows a table of its units.

    Attributes:
        path: The folder.
        manifest: What it says.
    """

    path: str
    manifest: Manifest

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(
            each.numel
            for each in self.manifest.tensors()
            if not isinstance(each, WholeSpec) or each.is_param
        )

    def __str__(self) -> str:
        manifest = self.manifest
        optim = manifest.optim
        versions = ", ".join(f"{k} {v}" for k, v in manifest.versions.items())
        buffers = [whole for whole in manifest.wholes if not whole.is_param]
        lines = [
            f"checkpoint   {self.path}",
            f"save         {manifest.save_id} ({versions})",
            f"ranks        {manifest.world_size}",
            f"bytes        {manifest.nbytes:,}",
            f"parameters   {self.numel:,} elements in {len(manifest.units)} units",
            f"buffers      {len(buffers)}",
            "optimizer    "
            + (
                "none"
                if optim is None
                else f"{optim.name}, {len(optim.groups)} groups, state of "
                f"{len(optim.states)} parameters"
            ),
            f"scheduler    {'none' if manifest.scheduler is None else 'saved'}",
            f"extra        {'none' if manifest.extra is None else 'saved'}",
            f"random       {'saved' if manifest.has_random_states else 'none'}",
            "",
        ]
        rows = [("unit", "ranks", "parameters", "numel", "dtypes")]
        rows += [
            (
                unit.name or "(root)",
                str(len(unit.ranks)),
                str(len(unit.params)),
                f"{sum(param.numel for param in unit.params):,}",
                "+".join(dict.fromkeys(segment.dtype for segment in unit.segments)),
            )
            for unit in manifest.units
        ]
        return "\n".join([*lines, table(rows, num_text=1)])


def info(path: str | os.PathLike[str]) -> Info:
    """Return what a checkpoint holds, from its manifest alone.

    Args:
        path: The folder.

    Raises:
        CheckpointError: There is none, or its manifest is damaged.
    """
    with Source(path) as source:
        return Info(source.path, source.manifest)


def verify(path: str | os.PathLike[str], *, progress: bool | None = None) -> Info:
    """Read all of a checkpoint and check everything. Communicates nothing.

    Args:
        path: The folder.
        progress: Show a bar; None: if stderr is a terminal.

    Raises:
        CheckpointError: It lists everything that is wrong.
    """
    with Source(path) as source:
        manifest = source.manifest
        expected = _expected(source)
        present = set(source.names())
        files = {MANIFEST}
        for rank in range(manifest.world_size):
            entry = entry_file(rank, manifest.world_size)
            files |= {entry, rank_file(rank, manifest.world_size)}
            rank_source = source.rank(rank) if entry in present else None
            if rank_source is not None:
                _check_entry(rank_source, expected.get(rank, {}), source.problems)
                rank_source.want(0, rank_source.entry.nbytes, "its header")
                for key in rank_source.entry.pieces:
                    rank_source.want_tensor(key)
        missing = files - present
        if missing:
            source.problems.append(
                f"{len(missing)} files are missing: {', '.join(sorted(missing)[:8])}"
                + (", ..." if len(missing) > 8 else "")
            )
        source.problems += [
            f"{name} is not a file of this checkpoint"
            for name in sorted(present - files)
            if OURS.fullmatch(name)
        ]
        total = sum(rank.entry.nbytes for rank in source.ranks.values())
        with progress_bar("verifying", total, progress) as advance:
            problems = source.check(advance)
        if problems:
            raise CheckpointError(f"the checkpoint {source.path} is damaged", problems)
        return Info(source.path, manifest)


def _expected(source: Source) -> dict[int, Expected]:
    """Return which pieces each rank must have."""
    manifest = source.manifest
    expected: dict[int, Expected] = {}

    def add(rank: int, spec: TensorSpec, begin: int, end: int) -> None:
        of_rank = expected.setdefault(rank, {})
        of_rank[model_key(spec.name)] = (spec.dtype, begin, end)
        optim = manifest.optim
        if optim is not None and spec.name in optim.states:
            for key, dtype in optim.states[spec.name].sharded.items():
                of_rank[state_key(spec.name, key)] = (dtype, begin, end)

    for unit in manifest.units:
        try:
            layout = source.holders.layout(unit)
        except ValueError as error:
            source.problems.append(str(error))
            continue
        for segment in range(len(unit.segments)):
            placement = _native.Placement.flat(layout, segment)
            for index, begin, end, shard, _ in placement.pieces:
                add(unit.ranks[shard], unit.params[index], begin, end)
    for whole in manifest.wholes:
        if whole.numel > 0 or not whole.is_param:
            add(0, whole, 0, whole.numel)
    return expected


def _check_entry(source: RankSource, expected: Expected, problems: list[str]) -> None:
    pieces = source.entry.pieces
    for key, (dtype, begin, end) in expected.items():
        piece = pieces.get(key)
        if piece is None and key in source.entry.special:
            continue
        if piece is None or (piece.dtype, piece.begin, piece.end) != (
            dtype,
            begin,
            end,
        ):
            problems.append(
                f"{source.name} has no {dtype} elements [{begin}, {end}) of {key!r}"
            )
    problems += [
        f"{source.name} holds {key!r}, which the manifest does not know"
        for key in pieces
        if key not in expected and not key.startswith("plain/")
    ]
