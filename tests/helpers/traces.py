"""Recordings that no rank made: times are known to the microsecond."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_c.tools.trace import Recorded, Span, UnitInfo

US = 1000

UNIT = UnitInfo(
    name="",
    strategy="FULL_SHARD",
    num_params=2,
    unsharded_nbytes=4 << 20,
    reduce_dtypes=("float32",),
    forward_prefetch=False,
    backward_prefetch="BACKWARD_PRE",
    shard_ranks=(0, 1),
    replica_ranks=(0,),
)
NAMES = ("", "a", "b")


@dataclass
class Times:
    """Microseconds of each part of the step that `recording` writes."""

    host: int = 10  # in every call of fsdp_c, beside the rest
    start: int = 5  # in the call that starts a collective
    gather_wait: int = 200  # for an unshard that was not ahead
    late_wait: int = 20  # for one that was
    reduce_wait: int = 300  # for all reductions, at the end
    forward: int = 1000  # compute of each unit
    backward: int = 2000
    rest: int = 500  # after backward


@dataclass
class Writer:
    """Writes spans, one after the other or one inside of the other."""

    now: int = 1000 * US
    spans: list[Span] = field(default_factory=list)
    sequence: int = 0
    held: int = 0

    def work(self, us: int) -> None:
        self.now += us * US

    @contextmanager
    def span(self, kind: str, unit: int = -1, **more: Any) -> Iterator[None]:
        begin = self.now
        yield
        more.setdefault("sequence", -1)
        more.setdefault("nbytes", self.held)
        self.spans.append(Span(begin, self.now, kind, unit, **more))

    def gather(self, unit: int, times: Times, *, is_ahead: bool) -> int:
        sequence = self.sequence
        self.sequence += 1
        with self.span("unshard", unit, is_ahead=is_ahead):
            with self.span("all_gather", unit, sequence=sequence, nbytes=4 << 20):
                self.work(times.start)
            self.held += 4 << 20
        return sequence

    def wait(self, sequence: int, us: int) -> None:
        with self.span("wait", sequence=sequence, nbytes=-1):
            self.work(us)


def recording(
    *,
    rank: int = 0,
    num_steps: int = 2,
    is_ahead: bool = False,
    times: Times | None = None,
    unit: UnitInfo = UNIT,
    begin_us: int = 1000,
    num_lost: int = 0,
) -> Recorded:
    """A root with the units a and b: forward, backward, reduce; all is waited for."""
    times = times or Times()
    w = Writer(now=begin_us * US)
    begin = w.now
    for _ in range(num_steps):
        _step(w, times, is_ahead=is_ahead)
    return Recorded(
        rank=rank,
        world_size=2,
        host="here",
        clock="one",
        device="cpu",
        transport="shm",
        units=tuple(replace(unit, name=name) for name in NAMES),
        spans=tuple(w.spans),
        begin=begin,
        end=w.now,
        num_lost=num_lost,
        counts={"num_allocs": 0},
    )


def _enter(w: Writer, times: Times, unit: int, kind: str, *, is_ahead: bool) -> None:
    with w.span(kind, unit):
        if kind == "pre_forward" and unit == 0:
            with w.span("step"):
                pass
        w.work(times.host)
        sequence = w.gather(unit, times, is_ahead=is_ahead)
        with w.span("wait_unshard", unit, is_ahead=is_ahead):
            w.wait(sequence, times.late_wait if is_ahead else times.gather_wait)


def _step(w: Writer, times: Times, *, is_ahead: bool) -> None:
    _enter(w, times, 0, "pre_forward", is_ahead=False)
    w.work(times.forward // 2)
    for unit in (1, 2):
        _enter(w, times, unit, "pre_forward", is_ahead=is_ahead)
        w.work(times.forward)
        with w.span("post_forward", unit):
            w.work(times.host)
            with w.span("reshard", unit):
                w.held -= 4 << 20
    w.work(times.forward // 2)
    with w.span("post_forward", 0):
        w.work(times.host)
    with w.span("pre_backward", 0):
        w.work(times.host)
        with w.span("wait_unshard", 0, is_kept=True):
            pass
    reductions = []
    for unit in (2, 1):
        _enter(w, times, unit, "pre_backward", is_ahead=is_ahead)
        w.work(times.backward)
        reductions.append(_grads(w, times, unit))
    w.work(times.backward)
    reductions.append(_grads(w, times, 0))
    with w.span("finish_backward"):
        w.work(times.host)
        with w.span("wait_reduces"):
            for sequence in reductions:
                w.wait(sequence, times.reduce_wait // 3)
    w.work(times.rest)


def _grads(w: Writer, times: Times, unit: int) -> int:
    with w.span("grad_ready", unit):
        w.work(times.host)
        with w.span("reshard", unit):
            w.held -= 4 << 20
        sequence = w.sequence
        w.sequence += 1
        with (
            w.span("reduce", unit),
            w.span("reduce_scatter", unit, sequence=sequence, nbytes=4 << 20),
        ):
            w.work(times.start)
    return sequence
