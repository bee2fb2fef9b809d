"""The trace-event format, which Perfetto and chrome://tracing show.

A rank is a process, a lane a thread. Two slices of a lane are nested or do not overlap.
Times are microseconds since the first thing that any rank recorded.
"""

from collections.abc import Sequence
from typing import Any

from fsdp_c.tools.trace._clocks import Alignment, align, describe
from fsdp_c.tools.trace._data import WHOLES
from fsdp_c.tools.trace._lanes import Lanes

Event = dict[str, Any]

# In the order in which they are shown.
THREADS = ("steps", "compute", "calls of fsdp_c", "unshard", "reduce", "replicate")


def chrome_trace(all_lanes: Sequence[Lanes]) -> dict[str, Any]:
    """Return the trace of several ranks, as the content of a JSON file."""
    alignments = align(all_lanes)
    origin = min(
        (lanes.recorded.begin + each.offset)
        for lanes, each in zip(all_lanes, alignments, strict=True)
    )
    events: list[Event] = []
    for lanes, each in zip(all_lanes, alignments, strict=True):
        events += _RankEvents(lanes, each, origin).make()
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "made_by": "fsdp_c.trace",
            "clocks": describe(alignments),
            "alignment": [
                {
                    "rank": lanes.recorded.rank,
                    "offset_us": each.offset / 1e3,
                    "uncertainty_us": each.uncertainty / 1e3,
                    "how": each.how,
                }
                for lanes, each in zip(all_lanes, alignments, strict=True)
            ],
        },
    }


class _RankEvents:
    """Makes the events of one rank."""

    def __init__(self, lanes: Lanes, alignment: Alignment, origin: int) -> None:
        self.lanes = lanes
        self.recorded = lanes.recorded
        self.rank = lanes.recorded.rank
        self.shift = alignment.offset - origin
        self.events: list[Event] = []

    def make(self) -> list[Event]:
        self._name()
        self._steps()
        self._compute()
        self._calls()
        self._collectives()
        self._prefetches()
        self._arena()
        return self.events

    def _us(self, time: int) -> float:
        return (time + self.shift) / 1e3

    def _add(self, phase: str, name: str, time: int, thread: str, **more: Any) -> None:
        self.events.append(
            {
                "ph": phase,
                "name": name,
                "ts": self._us(time),
                "pid": self.rank,
                "tid": THREADS.index(thread),
                **more,
            }
        )

    def _slice(
        self, name: str, begin: int, end: int, thread: str, category: str, **args: Any
    ) -> None:
        more: Event = {"cat": category, "dur": max(end - begin, 0) / 1e3}
        if args:
            more["args"] = args
        self._add("X", name, begin, thread, **more)

    def _name(self) -> None:
        recorded = self.recorded
        names: list[tuple[str, int, Event]] = [
            ("process_name", 0, {"name": f"rank {self.rank} on {recorded.host}"}),
            ("process_sort_index", 0, {"sort_index": self.rank}),
        ]
        used = {*THREADS[:3], *(each.lane for each in self.lanes.collectives)}
        for thread, name in enumerate(THREADS):
            if name in used:
                names.append(("thread_name", thread, {"name": name}))
                names.append(("thread_sort_index", thread, {"sort_index": thread}))
        for name, thread, args in names:
            self.events.append(
                {"ph": "M", "name": name, "pid": self.rank, "tid": thread, "args": args}
            )

    def _steps(self) -> None:
        for index, step in enumerate(self.lanes.steps):
            self._slice(f"step {index}", step.begin, step.end, "steps", "step")
            self._slice("forward", step.begin, step.forward_end, "steps", "step")
            if step.backward_begin > 0:
                end = max(step.backward_end, step.backward_begin)
                self._slice(
                    "backward", step.backward_begin, min(end, step.end), "steps", "step"
                )

    def _compute(self) -> None:
        for each in self.lanes.compute:
            name = f"{each.what} {self.recorded.label(each.unit)}"
            self._slice(name, each.begin, each.end, "compute", each.what)
        for span in self.lanes.wholes:
            begin, end = span.times
            self._slice(span.kind, begin, end, "compute", span.kind, bytes=span.nbytes)

    def _calls(self) -> None:
        """Spans of the host; they lie one inside the other."""
        ends: list[int] = []
        spans = (s for s in self.recorded.spans if s.kind != "step")
        for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
            while ends and ends[-1] <= span.begin:
                ends.pop()
            end = min([span.end, *ends[-1:]])  # nested even in an edited file
            ends.append(end)
            args: Event = {}
            if span.kind in ("unshard", "wait_unshard"):
                args["ahead"] = span.is_ahead
            if span.kind == "wait":
                args["was_complete"] = span.was_done
            if span.kind in WHOLES:
                args["bytes"] = span.nbytes
            name = span.kind
            if span.unit >= 0:
                name += f" {self.recorded.label(span.unit)}"
            self._slice(name, span.begin, end, "calls of fsdp_c", span.kind, **args)

    def _collectives(self) -> None:
        for index, each in enumerate(self.lanes.collectives):
            if each.end <= each.begin:
                continue
            name = f"{each.operation} {self.recorded.label(each.unit)}"
            self._slice(
                name,
                each.begin,
                each.end,
                each.lane,
                each.operation,
                bytes=each.nbytes,
                started_us=self._us(each.start.begin),
                host_waited_us=each.waited / 1e3,
                ahead=each.is_ahead,
            )
            arrow = {"cat": "start", "id": self.rank * 10_000_000 + index}
            self._add("s", name, each.start.begin, "calls of fsdp_c", **arrow)
            self._add(
                "f", name, max(each.begin, each.start.begin), each.lane, bp="e", **arrow
            )

    def _prefetches(self) -> None:
        for use in self.lanes.uses:
            self._add(
                "i",
                f"prefetch {'hit' if use.is_hit else 'miss'} "
                f"{self.recorded.label(use.unit)}",
                use.time,
                "compute",
                s="t",
                cat="prefetch",
            )

    def _arena(self) -> None:
        last = -1
        for time, nbytes in self.recorded.arena:
            if nbytes != last:
                self._add(
                    "C", "arena (bytes held)", time, "steps", args={"held": nbytes}
                )
            last = nbytes
