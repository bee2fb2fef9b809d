"""Recording: start, stop, and what one rank has then."""

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path

import torch.distributed as dist
from torch import nn

from fsdp_c import _native
from fsdp_c._engines.models import engines_with_units, memory_stats, units_in
from fsdp_c._units.owner import UnitFacts
from fsdp_c.tools.trace._data import (
    Recorded,
    Span,
    UnitInfo,
    prepare_folder,
    rank_path,
    write_json,
)
from fsdp_c.tools.trace._traces import Trace

# Spans of one step for each unit, parameter and peer, and a little more.
_SPANS_PER_UNIT = 64
_SPANS_PER_PARAM = 3
_SPANS_PER_PEER = 8
_MAX_PEERS = 8  # gloo gathers by one broadcast a rank up to that many
_MIN_CAPACITY = 4096
_MAX_CAPACITY = 1 << 20  # 48 MiB
# Engine i of a recording numbers its collectives from i * _SEQUENCES.
_SEQUENCES = 1 << 40


class Timeline:
    """A recording of one rank's steps: running at first, then what it gave.

    Other methods than :meth:`stop` are for when it has ended.
    """

    def __init__(
        self,
        engines: list[tuple[_native.Engine, tuple[UnitInfo, ...]]],
        model: nn.Module,
        folder: Path | None,
    ) -> None:
        self._engines = engines
        self._model: nn.Module | None = model
        self._folder = folder
        # Now: the program may have left its process groups when it stops.
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        facts = units_in(model)
        self._device = facts[0].device.type
        self._transport = _transport_of(facts)
        self._stats = memory_stats(model)
        self._begin = time.monotonic_ns()
        self._recorded: Recorded | None = None

    @property
    def is_recording(self) -> bool:
        """Whether what the model does is recorded: not full, not stopped."""
        return self._recorded is None and any(
            engine.is_recording for engine, _ in self._engines
        )

    @property
    def recorded(self) -> Recorded:
        """What was recorded.

        Raises:
            RuntimeError: The recording has not ended.
        """
        if self._recorded is None:
            raise RuntimeError(
                "recording has not ended: leave the `with` block, or call stop()"
            )
        return self._recorded

    @cached_property
    def trace(self) -> Trace:
        """The recording as a trace of one rank."""
        return Trace([self.recorded])

    def summary(self) -> str:
        """Return where this rank's time went, in words, and what to try."""
        return self.trace.summary()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a trace-event file of this rank, for Perfetto.

        Args:
            path: Of the file, which is replaced if it is there.

        Raises:
            OSError: It cannot be written.
        """
        self.trace.save(path)

    def draw(self, path: str | os.PathLike[str], *, step: int | None = None) -> None:
        """Draw one step of this rank.

        Args:
            path: The name's end says the format: .png, .svg, .pdf.
            step: 0 is the first that was recorded; the last if None.

        Raises:
            ImportError: matplotlib is not installed.
            TraceError: There is no such step.
        """
        self.trace.draw(path, step=step)

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``rank<N>.json`` in ``folder`` and return its path.

        Args:
            folder: The same for all ranks; made if need be.

        Raises:
            OSError: It cannot be written.
        """
        recorded = self.recorded
        path = rank_path(prepare_folder(folder, recorded.rank), recorded.rank)
        write_json(path, {**self.trace.chrome(), "fsdp_c": recorded.to_json()})
        return path

    def stop(self) -> "Timeline":
        """End the recording; write the rank's file if start() was given a folder.

        Nothing happens if it has ended already.

        Raises:
            OSError: The file cannot be written.
        """
        if self._recorded is None:
            self._take()
            if self._folder is not None:
                self.write(self._folder)
        return self

    def _take(self) -> None:
        assert self._model is not None
        end = time.monotonic_ns()
        spans: list[Span] = []
        units: list[UnitInfo] = []
        num_lost, full = 0, []
        for index, (engine, own_units) in enumerate(self._engines):
            entries, marks, lost, _, full_ns = engine.stop_timeline()
            spans += _spans(entries, marks, len(units), index * _SEQUENCES)
            units += own_units
            num_lost += lost
            full.append(full_ns)
        if all(full):
            end = max(full)
        self._recorded = Recorded(
            rank=self._rank,
            world_size=self._world_size,
            host=socket.gethostname(),
            clock=_clock(),
            device=self._device,
            transport=self._transport,
            units=tuple(units),
            spans=tuple(sorted(spans, key=lambda span: span.end)),
            begin=min([self._begin, *(span.begin for span in spans)]),
            end=end,
            num_lost=num_lost,
            counts=_grown(self._stats, self._model),
        )
        self._model = None


def _grown(before: dict[str, int], model: nn.Module) -> dict[str, int]:
    after = memory_stats(model)
    return {
        key: value - before.get(key, 0)
        for key, value in after.items()
        if key.startswith("num_") and key not in ("num_units", "num_blocks")
    }


def _spans(
    entries: bytes, marks: bytes, first_unit: int, first_sequence: int
) -> list[Span]:
    """Read what the engine gave."""
    times = struct.unpack(f"={len(marks) // 8}q", marks)

    def at(mark: int) -> int:
        return times[mark] if 0 <= mark < len(times) else -1

    spans = []
    for fields in struct.iter_unpack(_native.TIMELINE_FORMAT, entries):
        begin, end, sequence, nbytes, unit, mark_begin, mark_end, kind, flags = fields
        spans.append(
            Span(
                begin,
                end,
                _native.TIMELINE_KINDS[kind],
                unit + first_unit if unit >= 0 else -1,
                sequence + first_sequence if sequence >= 0 else -1,
                nbytes,
                bool(flags & _native.TIMELINE_IS_AHEAD),
                bool(flags & _native.TIMELINE_IS_KEPT),
                bool(flags & _native.TIMELINE_IS_UNUSED),
                bool(flags & _native.TIMELINE_WAS_DONE),
                at(mark_begin),
                at(mark_end),
            )
        )
    return spans


def _clock() -> str:
    """Name the clock: one since this boot, of this time namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/time"))
    except OSError:  # an old kernel: the host alone
        pass
    return " ".join(parts)


def _transport_of(units: list[UnitFacts]) -> str:
    """What carries the first group of several ranks, or ""."""
    for unit in units:
        if unit.shard_group is not None and unit.shard_group.size() > 1:
            return _native.transport(unit.shard_group, unit.device)[0]
    return ""


def _unit_info(unit: UnitFacts) -> UnitInfo:
    """Return what is recorded of a unit."""
    reduced = {
        unit.reduce_dtype or unit.param_dtype or dtype
        for dtype, requires_grad, *_ in unit.segments
        if requires_grad
    }
    return UnitInfo(
        name=unit.name,
        strategy=unit.strategy,
        num_params=sum(num_params for _, _, num_params, *_ in unit.segments),
        unsharded_nbytes=sum(
            unsharded_numel * dtype.itemsize
            for dtype, _, _, unsharded_numel, *_ in unit.segments
        ),
        reduce_dtypes=tuple(
            sorted(str(dtype).removeprefix("torch.") for dtype in reduced)
        ),
        forward_prefetch=unit.forward_prefetch,
        backward_prefetch=unit.backward_prefetch,
        shard_ranks=_ranks(unit.shard_group),
        replica_ranks=_ranks(unit.replica_group),
    )


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    if group is None:
        return (dist.get_rank() if dist.is_initialized() else 0,)
    return tuple(dist.get_process_group_ranks(group))


def _check_count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def _default_capacity(units: tuple[UnitInfo, ...], steps: int) -> int:
    per_step = sum(
        _SPANS_PER_UNIT
        + _SPANS_PER_PARAM * unit.num_params
        + _SPANS_PER_PEER * min(len(unit.shard_ranks), _MAX_PEERS)
        for unit in units
    )
    return min(max(steps * per_step, _MIN_CAPACITY), _MAX_CAPACITY)


def start(
    model: nn.Module,
    steps: int = 3,
    *,
    folder: str | os.PathLike[str] | None = None,
    capacity: int | None = None,
) -> Timeline:
    """Start to record what ``model`` does on this rank; ``stop()`` ends it.

    A step is from one forward of the outermost wrapped module to the next, with the
    backward and whatever follows. Before the model's first forward all ranks must call
    it: it is then the first use of the model's process groups.

    Args:
        model: The sharded model, of either API, between steps.
        steps: After so many nothing more is recorded.
        folder: Where stop() writes ``rank<N>.json``; made if need be.
        capacity: Spans that are kept, 48 bytes each; the oldest go first. By default
            enough for the steps, up to 2**20.

    Raises:
        OSError: ``folder`` cannot be written.
        RuntimeError: The model is recorded already, or in the middle of a step.
        TypeError: An argument is of a wrong type.
        ValueError: Nothing in ``model`` is sharded, or a number is below 1.
    """
    _check_count("steps", steps)
    if capacity is not None:
        _check_count("capacity", capacity)
    engines = [
        (engine, tuple(map(_unit_info, units)))
        for engine, units in engines_with_units(model)
    ]
    path = None
    if folder is not None:
        path = prepare_folder(folder, dist.get_rank() if dist.is_initialized() else 0)
    timeline = Timeline(engines, model, path)
    with ExitStack() as stack:  # all of them, or none
        for engine, units in engines:
            engine.start_timeline(capacity or _default_capacity(units, steps), steps)
            stack.callback(engine.stop_timeline)
        stack.pop_all()
    return timeline


@contextmanager
def record(
    model: nn.Module,
    steps: int = 3,
    *,
    folder: str | os.PathLike[str] | None = None,
    capacity: int | None = None,
) -> Iterator[Timeline]:
    """Record inside of a ``with`` block; the arguments and errors of :func:`start`.

    If the block raises, the recording ends and nothing is written.
    """
    timeline = start(model, steps, folder=folder, capacity=capacity)
    try:
        yield timeline
    except BaseException:
        timeline._folder = None
        raise
    finally:
        timeline.stop()
