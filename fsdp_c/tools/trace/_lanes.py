"""From spans to lanes: steps, what was computed, collectives in flight, waits.

Everything is of one rank, in ns of its clock.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from fsdp_c.tools.trace._data import WHOLES, Recorded, Span

# Calls into fsdp_c: one after the other, the other kinds lie inside of them.
CALLS = (
    "pre_forward",
    "post_forward",
    "pre_backward",
    "grad_ready",
    "finish_backward",
    "clip_grad_norm",
)
LANE_OF = {
    "all_gather": "unshard",
    "reduce_scatter": "reduce",
    "reduce_hook": "reduce",
    "all_reduce": "replicate",
}


class Slice(NamedTuple):
    """A stretch of a lane."""

    begin: int
    end: int
    unit: int
    what: str

    @property
    def duration(self) -> int:
        """Nanoseconds."""
        return self.end - self.begin


@dataclass
class TimedCollective:
    """One collective of one unit."""

    operation: str
    unit: int
    nbytes: int
    start: Span  # the calls that started it
    is_ahead: bool = False
    waits: list[Span] = field(default_factory=list)  # of the host
    # In flight, as a slice of its lane: behind those before it, until it was first
    # seen to be complete; end 0: never seen.
    begin: int = 0
    end: int = 0

    @property
    def lane(self) -> str:
        """The lane it runs on."""
        return LANE_OF[self.operation]

    @property
    def waited(self) -> int:
        """Nanoseconds that the host waited for it."""
        return sum(wait.duration for wait in self.waits)


class Use(NamedTuple):
    """A unit's parameters are needed: were they gathered ahead?"""

    unit: int
    time: int
    phase: str  # "forward" or "backward"
    is_hit: bool
    waited: int  # ns, of the host or of the device's compute lane


class Step(NamedTuple):
    """From the forward of the outermost unit to the next one, or to the end."""

    begin: int
    end: int
    forward_end: int  # of its first forward
    backward_begin: int  # 0: there was no backward
    backward_end: int


@dataclass
class Lanes:
    """What one rank did, by lane."""

    recorded: Recorded
    steps: list[Step]
    calls: list[Span]  # into fsdp_c
    compute: list[Slice]  # what: "forward", "backward", "recompute"
    collectives: list[TimedCollective]
    uses: list[Use]
    exposed: list[Slice]  # compute waits: "unshard", "reduce", "start"
    num_unused: int  # unused prefetches
    wholes: list[Span]  # of rounds of whole parameters
    inside: list[int]  # per call, ns of `exposed` inside of it
    on_device: bool  # compute and exposed are the device's, not the host's


def lanes_of(recorded: Recorded) -> Lanes:
    """Sort what a rank recorded into lanes."""
    spans = _whole_steps(recorded)
    calls = sorted((s for s in spans if s.kind in CALLS), key=lambda s: s.begin)
    collectives = _collectives(spans)
    on_device = recorded.has_device_times
    exposed = _exposed_on_device(spans) if on_device else _exposed_on_host(collectives)
    return Lanes(
        recorded=recorded,
        steps=_steps(spans, recorded.end),
        calls=calls,
        compute=_compute(_device_moments(spans) if on_device else _moments(spans)),
        collectives=collectives,
        uses=_uses(recorded, spans, calls, collectives, on_device=on_device),
        exposed=exposed,
        num_unused=sum(s.is_unused for s in spans),
        wholes=[s for s in spans if s.kind in WHOLES],
        inside=_inside(calls, _exposed_on_host(collectives)),
        on_device=on_device,
    )


def _whole_steps(recorded: Recorded) -> list[Span]:
    """Leave out what is left of a step whose begin was not seen, or overwritten."""
    first = next((s.begin for s in recorded.spans if s.kind == "step"), None)
    if first is None:
        return []
    outer = [
        s.begin
        for s in recorded.spans
        if s.kind == "pre_forward" and s.begin <= first <= s.end
    ]
    begin = min([first, *outer])
    return [s for s in recorded.spans if s.begin >= begin]


_T = TypeVar("_T", Span, Slice)


class _InOrder(Generic[_T]):
    """Items of a lane by their begins."""

    def __init__(self, items: Iterable[_T]) -> None:
        self.items: list[_T] = sorted(items, key=lambda item: item.begin)
        self._begins = [item.begin for item in self.items]

    def within(self, begin: int, end: int) -> list[_T]:
        """Return those that begin in ``[begin, end)``."""
        first, last = (bisect_left(self._begins, time) for time in (begin, end))
        return self.items[first:last]


# Steps ------------------------------------------------------------------------


def _steps(spans: list[Span], end: int) -> list[Step]:
    ordered = _InOrder(spans)
    entered = [s for s in ordered.items if s.kind == "pre_forward"]
    entries = [s.begin for s in entered]
    firsts = []
    for mark in (s.begin for s in ordered.items if s.kind == "step"):
        index = bisect_right(entries, mark) - 1  # of the root, around the mark
        is_around = index >= 0 and mark <= entered[index].end
        firsts.append(entries[index] if is_around else mark)
    steps = []
    for begin, limit in zip(firsts, [*firsts, end][1:], strict=True):
        inside = ordered.within(begin, limit)
        starts = [s.begin for s in inside if s.kind == "pre_backward"]
        ends = [s.end for s in inside if s.kind == "finish_backward"]
        left = [
            s.end
            for s in inside
            if s.kind == "post_forward" and (not starts or s.begin < starts[0])
        ]
        steps.append(
            Step(
                begin,
                limit,
                max(left, default=begin),
                min(starts, default=0),
                max(ends, default=0),
            )
        )
    return steps


# Compute ------------------------------------------------------------------------


class _Moment(NamedTuple):
    """The lane of compute is not computing from ``begin`` to ``end``; then ``kind``."""

    begin: int
    end: int
    kind: str
    unit: int


def _moments(spans: list[Span]) -> list[_Moment]:
    """The host computes itself: not while it is in a call of fsdp_c."""
    reshards = _InOrder(s for s in spans if s.kind == "reshard")
    moments = []
    for span in spans:
        if span.kind not in CALLS:
            continue
        kind = span.kind
        if kind == "grad_ready":  # the last one of a unit reshards it
            inside = reshards.within(span.begin, span.end)
            if any(reshard.unit == span.unit for reshard in inside):
                kind = "reshard"
        moments.append(_Moment(span.begin, span.end, kind, span.unit))
    return moments


def _device_moments(spans: list[Span]) -> list[_Moment]:
    """The device computes between the marks on its compute lane."""
    kinds = {*CALLS, "wait_unshard", "wait_reduces", "reshard"}
    return [
        _Moment(
            s.device_begin if s.device_begin >= 0 else s.device_end,
            s.device_end,
            s.kind,
            s.unit,
        )
        for s in spans
        if s.kind in kinds and s.device_end >= 0
    ]


def _compute(moments: list[_Moment]) -> list[Slice]:
    """What lies between the moments, for the innermost unit that is running."""
    slices: list[Slice] = []
    forward: list[int] = []
    backward: list[int] = []
    in_backward = False
    last = None
    for moment in sorted(moments):
        running = forward or backward
        if last is not None and running and moment.begin > last:
            what = "forward" if forward else "backward"
            if forward and in_backward:
                what = "recompute"
            slices.append(Slice(last, moment.begin, running[-1], what))
        last = moment.end if last is None else max(last, moment.end)
        if moment.kind == "pre_forward":
            forward.append(moment.unit)
        elif moment.kind == "post_forward":
            if moment.unit in forward:  # and those inside that raised
                del forward[_last_index(forward, moment.unit) :]
        elif moment.kind == "pre_backward":
            in_backward = True
            if moment.unit not in backward:
                backward.append(moment.unit)
        elif moment.kind == "reshard":
            if moment.unit in backward:
                backward.remove(moment.unit)
        elif moment.kind == "finish_backward":
            in_backward = False
            backward.clear()
            forward.clear()
    return slices


def _last_index(items: list[int], item: int) -> int:
    return len(items) - 1 - items[::-1].index(item)


# Collectives --------------------------------------------------------------------


def _collectives(spans: list[Span]) -> list[TimedCollective]:
    """All that were started, in that order, with the host's waits for each."""
    unshards = sorted((s for s in spans if s.kind == "unshard"), key=lambda s: s.end)
    ends = [s.end for s in unshards]
    found: dict[int, TimedCollective] = {}
    for span in sorted(spans, key=lambda s: s.begin):
        if span.kind in LANE_OF:
            index = bisect_left(ends, span.end)  # the unshard around it
            around = unshards[index] if index < len(ends) else None
            is_ahead = (
                around is not None and around.unit == span.unit and around.is_ahead
            )
            found[span.sequence] = TimedCollective(
                span.kind,
                span.unit,
                span.nbytes,
                span,
                is_ahead=span.kind == "all_gather" and is_ahead,
            )
        elif span.kind == "wait" and span.sequence in found:
            found[span.sequence].waits.append(span)
    ready: dict[str, int] = {}
    for each in found.values():
        span = each.start
        if span.device_end >= 0:
            each.begin, each.end = span.device_begin, span.device_end
        else:
            each.begin = max(span.begin, ready.get(each.lane, 0))
            each.end = max((wait.end for wait in each.waits), default=0)
            ready[each.lane] = max(ready.get(each.lane, 0), each.end)
    return list(found.values())


def _exposed_on_host(collectives: list[TimedCollective]) -> list[Slice]:
    """The host starts a collective, or waits for one: it does not compute."""
    slices = []
    for each in collectives:
        slices.append(Slice(each.start.begin, each.start.end, each.unit, "start"))
        what = "unshard" if each.lane == "unshard" else "reduce"
        slices += [Slice(w.begin, w.end, each.unit, what) for w in each.waits]
    return sorted(slices)


def _exposed_on_device(spans: list[Span]) -> list[Slice]:
    """The device's compute lane waits for another lane."""
    kinds = {"wait_unshard": "unshard", "wait_reduces": "reduce"}
    return sorted(
        Slice(s.device_begin, s.device_end, s.unit, kinds[s.kind])
        for s in spans
        if s.kind in kinds and s.has_device_times
    )


def _inside(calls: list[Span], slices: list[Slice]) -> list[int]:
    """Per call, the ns of ``slices`` that lie in it."""
    ordered = _InOrder(slices)
    return [
        sum(
            min(each.end, call.end) - each.begin
            for each in ordered.within(call.begin, call.end)
        )
        for call in calls
    ]


def _backwards(calls: list[Span]) -> list[tuple[int, int]]:
    """Return from when to when each backward ran."""
    ranges: list[tuple[int, int]] = []
    begin = None
    for call in calls:
        if call.kind == "pre_backward" and begin is None:
            begin = call.begin
        elif call.kind == "finish_backward":
            ranges.append((call.begin if begin is None else begin, call.end))
            begin = None
    return ranges if begin is None else [*ranges, (begin, 1 << 62)]


def _uses(
    recorded: Recorded,
    spans: list[Span],
    calls: list[Span],
    collectives: list[TimedCollective],
    *,
    on_device: bool,
) -> list[Use]:
    """Where a unit's parameters were needed, of units that are gathered at all."""
    waits = _InOrder(
        wait for each in collectives if each.lane == "unshard" for wait in each.waits
    )
    backwards = _backwards(calls)
    begins = [begin for begin, _ in backwards]
    uses = []
    for span in spans:
        if span.kind != "wait_unshard" or span.is_kept:
            continue
        if len(recorded.units[span.unit].shard_ranks) < 2:
            continue
        waited = span.device_end - span.device_begin
        if not on_device:
            waited = sum(w.duration for w in waits.within(span.begin, span.end))
        last = bisect_right(begins, span.begin) - 1
        in_backward = last >= 0 and span.begin <= backwards[last][1]
        phase = "backward" if in_backward else "forward"
        uses.append(Use(span.unit, span.begin, phase, span.is_ahead, waited))
    return uses
