"""Bringing the clocks of several ranks together.

Ranks of one host read one clock. Between hosts there is nothing but what the ranks
did together: a collective that rank i saw complete at ``done_i`` had been started by
every rank j before. So the time ``d`` that is to be added to the clock of j, to be
that of i, is at most ``done_i - start_j``, and by the same with i and j exchanged at
least ``start_i - done_j``. Every collective gives such a range; the true value lies
in all of them, and the middle of what is left is taken. Half its width is how far off
it can be. A clock's drift during the few steps is ignored.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fsdp_c.tools.trace._lanes import Lanes, TimedCollective


class Alignment(NamedTuple):
    """What makes a rank's times comparable to those of the lowest rank."""

    offset: int  # ns to add
    uncertainty: int  # ns by which that may be wrong; -1: nothing is known
    how: str  # "one clock", "collectives" or "not aligned"


class Meeting(NamedTuple):
    """A collective, as all ranks know it that take part."""

    operation: str
    unit: str
    ranks: tuple[int, ...]
    number: int  # how often that was before


def collectives_by_meeting(lanes: Lanes) -> dict[Meeting, TimedCollective]:
    """Return each collective of a rank by what it is on all ranks."""
    counts: Counter[Meeting] = Counter()
    found = {}
    for each in lanes.collectives:
        unit = lanes.recorded.units[each.unit]
        is_replicas = each.operation == "all_reduce"
        ranks = unit.replica_ranks if is_replicas else unit.shard_ranks
        key = Meeting(each.operation, unit.name, ranks, 0)
        found[key._replace(number=counts[key])] = each
        counts[key] += 1
    return found


def _between(reference: Lanes, other: Lanes) -> Alignment | None:
    """Return the offset of ``other`` to ``reference``, or None: no range is left."""
    ours = collectives_by_meeting(reference)
    theirs = collectives_by_meeting(other)
    pairs = [(ours[key], theirs[key]) for key in ours.keys() & theirs.keys()]
    pairs = [(mine, its) for mine, its in pairs if mine.end and its.end]
    if not pairs:
        return None
    low = max(mine.start.begin - its.end for mine, its in pairs)
    high = min(mine.end - its.start.begin for mine, its in pairs)
    if low > high:
        return None
    return Alignment((low + high) // 2, (high - low + 1) // 2, "collectives")


def align(all_lanes: Sequence[Lanes]) -> list[Alignment]:
    """Return one alignment per rank; the first rank's clock is the reference."""
    known: dict[int, Alignment] = {0: Alignment(0, 0, "one clock")}
    waiting = [0]
    while waiting:  # also ranks that share a group with an aligned one only
        near = waiting.pop(0)
        base = known[near]
        for index, lanes in enumerate(all_lanes):
            if index in known:
                continue
            if lanes.recorded.clock == all_lanes[near].recorded.clock:
                known[index] = base
            else:
                found = _between(all_lanes[near], lanes)
                if found is None:
                    continue
                known[index] = Alignment(
                    base.offset + found.offset,
                    base.uncertainty + found.uncertainty,
                    found.how,
                )
            waiting.append(index)
    lost = Alignment(0, -1, "not aligned")
    return [known.get(index, lost) for index in range(len(all_lanes))]


def describe(alignments: Sequence[Alignment]) -> str:
    """Return a sentence on how well the clocks agree."""
    if all(each.how == "one clock" for each in alignments):
        return "All ranks read one clock: their times are comparable as they are."
    lost = sum(each.uncertainty < 0 for each in alignments)
    worst = max(each.uncertainty for each in alignments)
    text = (
        "Clocks of different hosts were aligned by the collectives that the ranks had "
        f"in common; times of different ranks may be off by up to {worst / 1e3:.0f} us."
    )
    if lost:
        text += (
            f" {lost} ranks share no collective with the others, and are not aligned."
        )
    return text
