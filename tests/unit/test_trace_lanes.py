"""From spans to lanes, and where the time went: against the arithmetic of a step."""

from dataclasses import replace
from itertools import pairwise

import pytest

from fsdp_c.tools.trace import Recorded, Span, Trace
from fsdp_c.tools.trace._lanes import Lanes, lanes_of
from helpers.traces import UNIT, US, Times, recording

T = Times()
# Calls of a step: 3 pre_forward, 3 post_forward, 3 pre_backward, 3 grad_ready, 1 end.
NUM_CALLS = 13
NUM_GATHERS = 5  # root once, the others twice
STEP_US = (
    NUM_CALLS * T.host
    + NUM_GATHERS * (T.start + T.gather_wait)
    + 3 * T.start
    + T.reduce_wait
    + 3 * T.forward
    + 3 * T.backward
    + T.rest
)


def lanes(**change: object) -> Lanes:
    return lanes_of(recording(**change))  # type: ignore[arg-type]


def test_steps() -> None:
    found = lanes(num_steps=3)
    assert len(found.steps) == 3
    for index, step in enumerate(found.steps):
        assert step.begin == (1000 + index * STEP_US) * US
        assert step.end == step.begin + STEP_US * US
        forward_us = 6 * T.host + 3 * (T.start + T.gather_wait) + 3 * T.forward
        assert step.forward_end == step.begin + forward_us * US
        assert step.backward_begin == step.forward_end
        assert step.backward_end == step.end - T.rest * US


def test_compute_belongs_to_the_innermost_unit() -> None:
    found = lanes(num_steps=1)
    assert [(s.unit, s.what, s.duration // US) for s in found.compute] == [
        (0, "forward", T.forward // 2),
        (1, "forward", T.forward),
        (2, "forward", T.forward),
        (0, "forward", T.forward // 2),
        (2, "backward", T.backward),
        (1, "backward", T.backward),
        (0, "backward", T.backward),
    ]


def test_collectives_in_flight_stand_one_behind_the_other() -> None:
    found = lanes(num_steps=1)
    assert len(found.collectives) == NUM_GATHERS + 3
    gather = found.collectives[0]
    assert (gather.operation, gather.lane, gather.unit) == ("all_gather", "unshard", 0)
    assert gather.nbytes == 4 << 20
    assert gather.begin == gather.start.begin
    assert gather.end - gather.begin == (T.start + T.gather_wait) * US
    assert gather.waited == T.gather_wait * US
    reductions = [c for c in found.collectives if c.lane == "reduce"]
    assert [c.unit for c in reductions] == [2, 1, 0]
    for before, after in pairwise(reductions):
        assert after.start.begin < before.end  # started while that was in flight
        assert after.begin == before.end


def test_numbers_add_up() -> None:
    numbers = Trace([recording()]).numbers()
    assert numbers.num_steps == 2
    us = {
        "step": STEP_US,
        "compute": 3 * T.forward + 3 * T.backward,
        "unshard_wait": NUM_GATHERS * T.gather_wait,
        "backward_wait": 2 * T.gather_wait,
        "reduce_wait": T.reduce_wait,
        "start": (NUM_GATHERS + 3) * T.start,
        "host": NUM_CALLS * T.host,
        "rest": T.rest,
    }
    for name, expected in us.items():
        assert getattr(numbers, name) == pytest.approx(expected * US), name
    parts = numbers.compute + numbers.exposed + numbers.host + numbers.rest
    assert parts == pytest.approx(numbers.step)
    assert numbers.gathered_nbytes == NUM_GATHERS * (4 << 20)
    assert numbers.backward_gathers == 2
    assert numbers.arena_peak == 2 * (4 << 20)
    root = numbers.units["(root)"]
    assert root.unshard_wait == pytest.approx(T.gather_wait * US)
    assert root.reduce_wait == pytest.approx(T.reduce_wait / 3 * US)
    assert root.host == pytest.approx(4 * T.host * US)
    assert numbers.units["a"].compute == pytest.approx((T.forward + T.backward) * US)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_prefetches(is_ahead: bool) -> None:
    numbers = Trace([recording(is_ahead=is_ahead)]).numbers()
    forward, backward = numbers.phases["forward"], numbers.phases["backward"]
    # Of the root nothing is ahead; in backward its block is still there.
    assert (forward.hits, forward.misses) == ((4, 2) if is_ahead else (0, 6))
    assert (backward.hits, backward.misses) == ((4, 0) if is_ahead else (0, 4))
    assert backward.hit_rate == (1.0 if is_ahead else 0.0)
    assert forward.late == 0  # 20 us are as good as nothing
    late = Trace([recording(is_ahead=True, times=Times(late_wait=90))]).numbers()
    assert late.phases["backward"].late == 4


def test_units_that_are_not_sharded_have_no_prefetches() -> None:
    unit = replace(UNIT, shard_ranks=(0,))
    numbers = Trace([recording(unit=unit)]).numbers()
    assert numbers.phases["forward"].hit_rate is None


def test_recomputation_in_backward() -> None:
    """A unit's forward inside of a backward is none of the step's forward."""
    u = US
    spans = [
        Span(0, 0, "step", -1, -1, 0),
        Span(0, 1 * u, "pre_forward", 0, -1, 0),
        Span(5 * u, 6 * u, "post_forward", 0, -1, 0),
        Span(7 * u, 8 * u, "pre_backward", 0, -1, 0),
        Span(9 * u, 10 * u, "pre_forward", 1, -1, 0),
        Span(14 * u, 15 * u, "post_forward", 1, -1, 0),
        Span(20 * u, 21 * u, "finish_backward", -1, -1, 0),
    ]
    base = recording(num_steps=0)
    found = lanes_of(replace(base, spans=tuple(spans), end=30 * u))
    assert [(s.unit, s.what, s.duration // u) for s in found.compute] == [
        (0, "forward", 4),
        (0, "backward", 1),
        (1, "recompute", 4),
        (0, "backward", 5),
    ]
    assert found.steps[0].forward_end == 6 * u


def test_a_forward_that_raised() -> None:
    """Units that were left without a post_forward end with the one around them."""
    u = US
    spans = [
        Span(0, 0, "step", -1, -1, 0),
        Span(0, 1 * u, "pre_forward", 0, -1, 0),
        Span(2 * u, 3 * u, "pre_forward", 1, -1, 0),
        Span(4 * u, 5 * u, "post_forward", 0, -1, 0),
        Span(7 * u, 8 * u, "pre_forward", 0, -1, 0),
        Span(9 * u, 10 * u, "post_forward", 0, -1, 0),
    ]
    base = recording(num_steps=0)
    found = lanes_of(replace(base, spans=tuple(spans), end=30 * u))
    assert [(s.unit, s.begin // u) for s in found.compute] == [(0, 1), (1, 3), (0, 8)]


def test_a_step_whose_begin_was_overwritten_is_left_out() -> None:
    whole = recording(num_steps=3)
    cut = replace(whole, spans=whole.spans[20:], num_lost=20)
    found = lanes_of(cut)
    assert len(found.steps) == 2
    assert min(call.begin for call in found.calls) == found.steps[0].begin
    numbers = Trace([cut]).numbers()
    assert numbers.step == pytest.approx(STEP_US * US)


def on_device(base: Recorded, delay: int) -> Recorded:
    """The same spans, done by a device ``delay`` us later; waits are half as long."""
    marked = {"step", "unshard", "reduce", "grad_ready", "wait"}
    spans = []
    for span in base.spans:
        if span.kind not in marked:
            shift = delay * US
            begin, end = span.begin + shift, span.end + shift
            spans.append(span._replace(device_begin=begin, device_end=end))
        else:
            spans.append(span)
    return replace(base, device="cuda", spans=tuple(spans))


def test_device_times_stand_for_the_hosts() -> None:
    found = lanes_of(on_device(recording(num_steps=1), delay=50))
    assert found.on_device
    numbers = Trace([found.recorded]).numbers()
    assert numbers.on_device
    # The compute lane waits where the marks around the wait say so.
    assert numbers.unshard_wait == pytest.approx(NUM_GATHERS * T.gather_wait * US)
    assert numbers.reduce_wait == pytest.approx(T.reduce_wait * US)
    assert numbers.exposed == numbers.unshard_wait + numbers.reduce_wait
    gather = found.collectives[0]
    assert gather.begin == gather.start.begin + 50 * US
    units = [(s.unit, s.what) for s in found.compute if s.duration > 100 * US]
    assert (1, "forward") in units
    assert (2, "backward") in units
