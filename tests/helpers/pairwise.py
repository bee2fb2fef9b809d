"""Which rows of a table still hold every pair of values."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

Row = Mapping[str, Hashable]


def _pairs(row: Row, spread: str) -> set[Hashable]:
    """Return the pairs of a row, and the cells without one: a single or spread one."""
    cells = sorted(cell for cell in row.items() if cell[0] != spread)
    pairs: set[Hashable] = set(combinations(cells, 2) if len(cells) > 1 else cells)
    return pairs | {(spread, row[spread])} if spread in row else pairs


def covering(rows: Sequence[Row], spread: str = "") -> list[int]:
    """Return the indices of rows that hold every pair of values that ``rows`` holds.

    Of the column ``spread`` every value is held, about equally often, but no pairs.
    Equal rows are a choice like any other, so rows without columns give one index.
    Always the same ones: of rows that are as good the first is taken.
    """
    pairs = [_pairs(row, spread) for row in rows]
    missing = set().union(*pairs)
    uses: Counter[Hashable] = Counter()

    def gain(index: int) -> tuple[int, int]:
        return len(pairs[index] & missing), -uses[rows[index].get(spread)]

    chosen: list[int] = []
    while missing or (rows and not chosen):
        best = max(range(len(rows)), key=gain)
        chosen.append(best)
        missing -= pairs[best]
        uses[rows[best].get(spread)] += 1
    return sorted(chosen)
