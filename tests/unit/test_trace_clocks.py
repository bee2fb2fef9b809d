"""Clocks of several hosts: the truth lies in the range that is given."""

from dataclasses import replace

import pytest

from fsdp_c.tools.trace import Recorded, Span, Trace
from fsdp_c.tools.trace._clocks import align, describe
from fsdp_c.tools.trace._lanes import lanes_of
from helpers.traces import US, recording


def shifted(base: Recorded, by: int, *, rank: int, clock: str) -> Recorded:
    """What another rank with another clock would have recorded of the same."""
    spans = tuple(s._replace(begin=s.begin + by, end=s.end + by) for s in base.spans)
    return replace(
        base,
        spans=spans,
        begin=base.begin + by,
        end=base.end + by,
        rank=rank,
        clock=clock,
    )


def test_one_clock_is_left_alone() -> None:
    ranks = [recording(rank=rank) for rank in (0, 1)]
    alignments = align([lanes_of(each) for each in ranks])
    assert [(a.offset, a.uncertainty) for a in alignments] == [(0, 0), (0, 0)]
    assert "one clock" in describe(alignments)


@pytest.mark.parametrize("by_us", [-7_000_000, -3, 0, 12, 86_400_000_000])
def test_the_true_offset_is_in_the_range(by_us: int) -> None:
    by = by_us * US
    base = recording(begin_us=10_000_000)
    ranks = [base, shifted(base, by, rank=1, clock="two")]
    _, other = align([lanes_of(each) for each in ranks])
    assert other.how == "collectives"
    assert abs(other.offset + by) <= other.uncertainty
    # A gather takes 205 us from its start to when it is seen: the range is no wider.
    assert other.uncertainty <= 205 * US
    assert "205 us" in describe([other])


def test_a_late_rank_makes_the_range_narrow_on_one_side_only() -> None:
    """Rank 1 starts everything 100 us later, in truth: it may look like an offset."""
    late = recording(rank=1, begin_us=1100)
    other = replace(late, clock="two")
    _, found = align([lanes_of(recording()), lanes_of(other)])
    assert abs(found.offset) <= found.uncertainty  # the truth is 0


def test_ranks_without_a_common_collective_are_not_aligned() -> None:
    alone = replace(
        recording(rank=1),
        clock="two",
        units=tuple(
            replace(unit, shard_ranks=(1,), replica_ranks=(1,))
            for unit in recording().units
        ),
        spans=(Span(0, 0, "step", -1, -1, 0),),
    )
    alignments = align([lanes_of(recording()), lanes_of(alone)])
    assert alignments[1].how == "not aligned"
    assert "not aligned" in describe(alignments)


def test_contradictions_are_not_made_into_an_offset() -> None:
    """Rank 1 is early in the first half and late in the second: not an offset."""
    base = recording(num_steps=1)
    middle = (base.begin + base.end) // 2
    spans = tuple(
        s._replace(begin=s.begin * 3, end=s.end * 3) if s.begin > middle else s
        for s in base.spans
    )
    other = replace(base, rank=1, clock="two", spans=spans, end=base.end * 3)
    alignments = align([lanes_of(base), lanes_of(other)])
    assert alignments[1].how == "not aligned"


def test_through_a_rank_between() -> None:
    """0 and 2 share nothing; both share the collectives of some units with 1."""

    def with_groups(base: Recorded, *groups: tuple[int, ...]) -> Recorded:
        units = tuple(
            replace(unit, shard_ranks=shard)
            for unit, shard in zip(base.units, groups, strict=True)
        )
        return replace(base, units=units, world_size=3)

    front, back = (0, 1), (1, 2)
    first = with_groups(recording(), front, front, front)
    between = shifted(recording(), 5 * US, rank=1, clock="b")
    both = with_groups(between, front, back, back)
    other = shifted(recording(), 9 * US, rank=2, clock="c")
    last = with_groups(other, back, back, back)
    alignments = align([lanes_of(each) for each in (first, both, last)])
    assert abs(alignments[2].offset + 9 * US) <= alignments[2].uncertainty
    assert alignments[2].uncertainty > alignments[1].uncertainty


def test_skew_is_the_wait_for_a_rank_that_had_not_started() -> None:
    """Rank 1 comes 150 us later to every collective, and rank 0 waits for it."""
    early, late = recording(), recording(rank=1, begin_us=1150)
    numbers = Trace([early, late]).numbers()
    # Rank 0 waits in each of 5 gathers from 5 us after its start on; 150 us after it
    # rank 1 starts: 145 us are for rank 1. Per step and rank it is half of that.
    gathers = 5 * 145 * US / 2
    assert numbers.skew == pytest.approx(gathers)
    assert max(numbers.late_ranks, key=lambda rank: numbers.late_ranks[rank]) == 1
    assert Trace([recording(), recording(rank=1)]).numbers().skew == 0
