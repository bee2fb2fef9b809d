"""What one rank recorded, and its file.

A rank's file is a trace that Perfetto opens by itself (``traceEvents``); everything
else in it, under ``fsdp_c``, is what was recorded, from which merged traces,
pictures and summaries are made.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Of a round of a whole_parameter_optimizer, outside of the engine.
WHOLES = ("gather_wholes", "step_wholes", "scatter_wholes")
VERSION = 1
FILE_PATTERN = "rank*.json"


class TraceError(ValueError):
    """A trace cannot be read, or does not match the others."""


class Span(NamedTuple):
    """Something that one rank did, from ``begin`` to ``end``, in ns of its clock."""

    begin: int
    end: int
    kind: str  # one of _native.TIMELINE_KINDS
    unit: int  # index in Recorded.units; -1: none
    sequence: int  # of a collective; -1: none
    # Of a collective, or a round of whole parameters; else of the arena at the end;
    # -1: not known.
    nbytes: int
    is_ahead: bool = False  # unshard: a prefetch; wait_unshard: of one
    is_kept: bool = False  # wait_unshard: the memory was still there
    is_unused: bool = False  # reshard: of an unused prefetch
    was_done: bool = False  # wait: it was complete before
    # When the device did it, in ns of the same clock; -1: not known.
    device_begin: int = -1
    device_end: int = -1

    @property
    def duration(self) -> int:
        """Nanoseconds of the host."""
        return self.end - self.begin

    @property
    def has_device_times(self) -> bool:
        """Whether it is known when the device did it."""
        return self.device_begin >= 0 and self.device_end >= 0

    @property
    def times(self) -> tuple[int, int]:
        """Begin and end on the device if they are known, else on the host."""
        if self.has_device_times:
            return self.device_begin, self.device_end
        return self.begin, self.end

    @property
    def seen(self) -> int:
        """Nanoseconds of the device if they are known, else of the host."""
        begin, end = self.times
        return end - begin

    @property
    def has_arena(self) -> bool:
        """Whether ``nbytes`` are those that the arena held."""
        return self.sequence < 0 <= self.nbytes and self.kind not in WHOLES


@dataclass(frozen=True)
class UnitInfo:
    """A unit, and the settings that advice may be about."""

    name: str
    strategy: str
    num_params: int
    unsharded_nbytes: int  # in the dtype of the shards
    reduce_dtypes: tuple[str, ...]  # "float32"; empty: all is frozen
    forward_prefetch: bool
    backward_prefetch: str  # "BACKWARD_PRE", "BACKWARD_POST" or ""
    shard_ranks: tuple[int, ...]  # global; a single one: nothing is gathered
    replica_ranks: tuple[int, ...]

    @property
    def label(self) -> str:
        """Its name, for readers."""
        return self.name or "(root)"


@dataclass(frozen=True)
class Recorded:
    """What one rank recorded. Times are ns of its monotonic clock."""

    rank: int
    world_size: int
    host: str
    clock: str  # ranks with the same text have the same clock
    device: str
    transport: str  # what carries the collectives: "shm", "nccl", "c10d" or ""
    units: tuple[UnitInfo, ...]
    spans: tuple[Span, ...]
    begin: int
    end: int
    num_lost: int = 0  # spans that were overwritten
    counts: dict[str, int] = field(default_factory=dict)  # grown while recording

    @property
    def has_device_times(self) -> bool:
        """Whether spans know when a device did its work."""
        return any(span.device_end >= 0 for span in self.spans)

    @property
    def arena(self) -> list[tuple[int, int]]:
        """Bytes that the arena held, in order: (time, bytes)."""
        ordered = sorted(self.spans, key=lambda span: span.end)
        return [(span.end, span.nbytes) for span in ordered if span.has_arena]

    def label(self, unit: int) -> str:
        """Return the name of unit ``unit`` for readers."""
        return self.units[unit].label if unit >= 0 else "all units"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["units"] = [asdict(unit) for unit in self.units]
        plain["spans"] = [_plain(span) for span in self.spans]
        return {"version": VERSION, **plain}


def _plain(span: Span) -> list[Any]:
    return [int(each) if isinstance(each, bool) else each for each in span]


def _unit_from(plain: dict[str, Any]) -> UnitInfo:
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in plain.items()
    }
    return UnitInfo(**fields)


def from_json(plain: dict[str, Any]) -> Recorded:
    """Return what :meth:`Recorded.to_json` gave.

    Raises:
        TraceError: It is something else, or of another version.
    """
    plain = dict(plain)
    version = plain.pop("version", None)
    if version != VERSION:
        raise TraceError(
            f"its format has version {version}; this fsdp_c reads {VERSION}"
        )
    try:
        units = tuple(_unit_from(unit) for unit in plain.pop("units"))
        spans = tuple(
            Span(*fields[:6], *map(bool, fields[6:10]), *fields[10:])
            for fields in plain.pop("spans")
        )
        return Recorded(units=units, spans=spans, **plain)
    except (KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"the trace is damaged: {error}") from error


def write_json(path: Path, content: Any) -> None:
    """Write a file whole or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, separators=(",", ":"))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def rank_path(folder: Path, rank: int) -> Path:
    """Where rank ``rank`` writes."""
    return folder / f"rank{rank}.json"


def prepare_folder(folder: str | os.PathLike[str], rank: int) -> Path:
    """Make ``folder`` if need be and try to write in it.

    Raises:
        OSError: That is not possible.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path, prefix=".try")
        os.close(descriptor)
        os.unlink(name)
    except OSError as error:
        raise OSError(
            error.errno,
            f"rank {rank} cannot write traces there ({error.strerror}); choose a "
            "folder that every rank can write",
            str(path),
        ) from error
    return path


def read_file(path: Path) -> Recorded:
    """Return what a rank's file holds.

    Raises:
        OSError: It cannot be read.
        TraceError: It is not a trace of fsdp_c.
    """
    try:
        content = json.loads(path.read_text())
        recorded = content["fsdp_c"]
    except (ValueError, KeyError, TypeError):
        raise TraceError(
            f"{path} is not what fsdp_c.trace writes for a rank (rank0.json, ...)"
        ) from None
    try:
        return from_json(recorded)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def read_folder(folder: str | os.PathLike[str]) -> list[Recorded]:
    """Return what the ranks recorded, in any order.

    Raises:
        OSError: ``folder`` cannot be read.
        TraceError: It holds no traces.
    """
    path = Path(folder)
    if not path.is_dir():
        raise TraceError(
            f"{path} is not a folder: pass the folder that the ranks wrote to"
        )
    found = [read_file(each) for each in path.glob(FILE_PATTERN)]
    if not found:
        raise TraceError(
            f"there is no rank0.json in {path}: nothing was recorded there, or the "
            "ranks have not written yet"
        )
    return found


def check_ranks(found: Sequence[Recorded]) -> list[Recorded]:
    """Return the recordings of one run in rank order.

    Raises:
        TraceError: They are of several runs.
    """
    ordered = sorted(found, key=lambda each: each.rank)
    sizes = {each.world_size for each in ordered}
    if len(sizes) > 1:
        raise TraceError(
            f"these traces come from runs with {' and '.join(map(str, sorted(sizes)))} "
            "ranks: keep one run per folder"
        )
    ranks = [each.rank for each in ordered]
    if len(set(ranks)) < len(ranks):
        raise TraceError(f"these traces contain one rank several times: {ranks}")
    return ordered
