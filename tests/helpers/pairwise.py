"""Which rows of a table still hold every pair of values."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

Row = Mapping[str, Hashable]


def _tuples(row: Row, spread: str) -> set[Hashable]:
    """Return the pairs of cells, or the only one; a spread cell is alone."""
    cells = sorted(cell for cell in row.items() if cell[0] != spread)
    tuples: set[Hashable] = set(combinations(cells, min(2, len(cells))))
    return tuples | {(spread, row[spread])} if spread in row else tuples


def covering(rows: Sequence[Row], spread: str = "") -> list[int]:
    """Return the indices of rows that hold every pair of values that ``rows`` holds.

    Those that add most come first. Of the column ``spread`` every value is held, about
    equally often, but no pairs. Equal rows are a choice like any other, so rows without
    columns give one index. Always the same ones: of rows that are as good the first is
    taken.
    """
    tuples = [_tuples(row, spread) for row in rows]
    missing = set().union(*tuples)
    uses: Counter[Hashable] = Counter()

    def gain(index: int) -> tuple[int, int]:
        return len(tuples[index] & missing), -uses[rows[index].get(spread)]

    chosen: list[int] = []
    while missing or (rows and not chosen):
        best = max(range(len(rows)), key=gain)
        chosen.append(best)
        missing -= tuples[best]
        uses[rows[best].get(spread)] += 1
    return chosen
