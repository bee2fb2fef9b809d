"""Which rows of a table still hold every pair of values."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

Row = Mapping[str, Hashable]


def _pairs(row: Row) -> set[Hashable]:
    """Return the pairs of a row; of a row with one column its only value."""
    cells = sorted(row.items(), key=lambda cell: cell[0])
    return set(combinations(cells, 2)) if len(cells) > 1 else set(cells)


def covering(rows: Sequence[Row]) -> list[int]:
    """Return the indices of rows that hold every pair of values that ``rows`` holds.

    Equal rows are a choice like any other, so rows without columns give one index.
    Always the same ones: of rows that add as many new pairs the first is taken.
    """
    pairs = [_pairs(row) for row in rows]
    missing = set().union(*pairs)
    chosen: list[int] = []
    while missing or (rows and not chosen):
        best = max(range(len(rows)), key=lambda index: len(pairs[index] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)
