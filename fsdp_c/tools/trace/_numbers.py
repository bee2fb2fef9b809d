"""What a summary says, as numbers: where the time of the steps went."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

from fsdp_c.tools.trace._clocks import (
    Alignment,
    Meeting,
    align,
    collectives_by_meeting,
)
from fsdp_c.tools.trace._lanes import Lanes

# A hit that still waited this long had come late.
LATE_NS = 50_000


@dataclass
class UnitNumbers:
    """One unit, ns per step (of all ranks' means)."""

    unshard_wait: float = 0.0
    reduce_wait: float = 0.0
    start: float = 0.0  # in the calls that start collectives
    host: float = 0.0  # in fsdp_c, without waits and starts
    compute: float = 0.0

    @property
    def waited(self) -> float:
        """All waits for its collectives."""
        return self.unshard_wait + self.reduce_wait


@dataclass
class PhaseNumbers:
    """Prefetches of one phase, over all steps and ranks."""

    hits: int = 0
    late: int = 0  # of the hits
    misses: int = 0
    miss_wait: float = 0.0  # ns per step
    late_wait: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """From 0 to 1; None: nothing was gathered."""
        total = self.hits + self.misses
        return self.hits / total if total else None


@dataclass(kw_only=True)
class Numbers(UnitNumbers):
    """All units, and what is of none."""

    num_ranks: int
    num_steps: int
    step: float = 0.0
    clip: float = 0.0  # in clip_grad_norm_, its own collective included
    rest: float = 0.0  # outside of forward and backward: optimizer, data, loss
    # Of `rest`, by kind: rounds of whole parameters, their bytes, how many there were.
    wholes: dict[str, float] = field(default_factory=dict)
    whole_nbytes: dict[str, float] = field(default_factory=dict)
    num_rounds: float = 0.0
    backward_wait: float = 0.0  # of unshard_wait
    units: dict[str, UnitNumbers] = field(default_factory=dict)
    phases: dict[str, PhaseNumbers] = field(default_factory=dict)
    num_unused: int = 0
    gathered_nbytes: float = 0.0  # per step and rank
    num_gathers: float = 0.0
    backward_gathers: float = 0.0  # of them
    arena_peak: int = 0  # highest of all ranks
    late_ranks: dict[int, float] = field(default_factory=dict)  # ns per step, see below
    skew: float = 0.0  # of the waits: the last rank had not started yet
    on_device: bool = False
    starts_block: bool = True  # starting moves data: no device does that
    num_lost: int = 0

    @property
    def exposed(self) -> float:
        """Communication that nothing was computed under."""
        return self.waited + (self.start if self.starts_block else 0.0)

    def share(self, time: float) -> float:
        """Part of a step, from 0 to 1."""
        return time / self.step if self.step > 0 else 0.0


def numbers_of(all_lanes: Sequence[Lanes]) -> Numbers:
    """Return where the time went, over ranks that recorded the same run."""
    num_steps = min(len(lanes.steps) for lanes in all_lanes)
    numbers = Numbers(num_ranks=len(all_lanes), num_steps=num_steps)
    numbers.phases = {"forward": PhaseNumbers(), "backward": PhaseNumbers()}
    for lanes in all_lanes:
        if lanes.steps:
            _add_rank(numbers, lanes, 1.0 / (len(lanes.steps) * len(all_lanes)))
    if len(all_lanes) > 1 and num_steps > 0:
        _add_skew(numbers, all_lanes, align(all_lanes))
    return numbers


def _add_rank(numbers: Numbers, lanes: Lanes, weight: float) -> None:
    recorded = lanes.recorded
    units = [numbers.units.setdefault(u.label, UnitNumbers()) for u in recorded.units]
    numbers.on_device = numbers.on_device or lanes.on_device
    numbers.starts_block = numbers.starts_block and recorded.device == "cpu"
    numbers.num_lost += recorded.num_lost
    numbers.num_unused += lanes.num_unused
    held = [nbytes for _, nbytes in recorded.arena]
    numbers.arena_peak = max([numbers.arena_peak, *held])
    step = sum(each.end - each.begin for each in lanes.steps)
    numbers.step += weight * step
    in_model = sum(
        (each.forward_end - each.begin)
        + max(each.backward_end - each.backward_begin, 0)
        for each in lanes.steps
    )
    clip = sum(s.duration for s in lanes.calls if s.kind == "clip_grad_norm")
    numbers.clip += weight * clip
    numbers.rest += weight * max(step - in_model - clip, 0)
    for span in lanes.wholes:
        time = numbers.wholes.get(span.kind, 0.0)
        numbers.wholes[span.kind] = time + weight * span.seen
        nbytes = numbers.whole_nbytes.get(span.kind, 0.0)
        numbers.whole_nbytes[span.kind] = nbytes + weight * span.nbytes
        numbers.num_rounds += weight if span.kind == "step_wholes" else 0.0

    def times_of(unit: int) -> list[UnitNumbers]:
        return [numbers] if unit < 0 else [numbers, units[unit]]

    for each in lanes.compute:
        for times in times_of(each.unit):
            times.compute += weight * each.duration
    for each in lanes.exposed:
        for times in times_of(each.unit):
            if each.what == "unshard":
                times.unshard_wait += weight * each.duration
            elif each.what == "reduce":
                times.reduce_wait += weight * each.duration
            else:
                times.start += weight * each.duration
    for call, inside in zip(lanes.calls, lanes.inside, strict=True):
        for times in times_of(call.unit) if call.kind != "clip_grad_norm" else ():
            times.host += weight * max(call.duration - inside, 0)
    _add_collectives(numbers, lanes, weight)
    _add_uses(numbers, lanes, weight)


def _add_collectives(numbers: Numbers, lanes: Lanes, weight: float) -> None:
    for each in lanes.collectives:
        if lanes.on_device:
            numbers.start += weight * each.start.duration
        if each.lane == "unshard":
            numbers.num_gathers += weight
            numbers.gathered_nbytes += weight * each.nbytes


def _add_uses(numbers: Numbers, lanes: Lanes, weight: float) -> None:
    for use in lanes.uses:
        phase = numbers.phases[use.phase]
        waited = weight * use.waited
        if use.is_hit:
            phase.hits += 1
            if use.waited > LATE_NS:
                phase.late += 1
                phase.late_wait += waited
        else:
            phase.misses += 1
            phase.miss_wait += waited
        if use.phase == "backward":
            numbers.backward_wait += waited
            numbers.backward_gathers += weight


def _add_skew(
    numbers: Numbers, all_lanes: Sequence[Lanes], alignments: Sequence[Alignment]
) -> None:
    """How long ranks waited for one that had not even started its part."""
    started: dict[Meeting, dict[int, int]] = {}
    waits: dict[Meeting, list[tuple[int, int]]] = {}
    for lanes, clock in zip(all_lanes, alignments, strict=True):
        if clock.uncertainty < 0:
            continue
        for key, each in collectives_by_meeting(lanes).items():
            begin = each.start.begin + clock.offset
            started.setdefault(key, {})[lanes.recorded.rank] = begin
            waits.setdefault(key, []).extend(
                (w.begin + clock.offset, w.end + clock.offset) for w in each.waits
            )
    steps = mean(len(lanes.steps) for lanes in all_lanes)
    for key, begins in started.items():
        if len(begins) < 2:
            continue
        rank, last = max(begins.items(), key=lambda item: item[1])
        lost = sum(max(min(end, last) - begin, 0) for begin, end in waits[key])
        lost_per_step = lost / (steps * len(all_lanes))
        numbers.skew += lost_per_step
        numbers.late_ranks[rank] = numbers.late_ranks.get(rank, 0.0) + lost_per_step
