from itertools import combinations, product

import pytest

from helpers.pairwise import covering


def _table(*numbers: int) -> list[dict[str, int]]:
    """Return the full product of columns with so many values."""
    names = [f"column {index}" for index in range(len(numbers))]
    rows = product(*(range(number) for number in numbers))
    return [dict(zip(names, row, strict=True)) for row in rows]


def _pairs(rows: list[dict[str, int]]) -> set[object]:
    return {pair for row in rows for pair in combinations(row.items(), 2)}


@pytest.mark.parametrize(
    ("numbers", "most"), [((3, 2), 6), ((11, 3, 2, 2), 33), ((3, 3, 3, 2), 9)]
)
def test_every_pair_is_in_the_rows(numbers: tuple[int, ...], most: int) -> None:
    rows = _table(*numbers)
    chosen = [rows[index] for index in covering(rows)]
    assert _pairs(chosen) == _pairs(rows)
    assert len(chosen) <= most


def test_pairs_that_no_row_holds_are_not_asked_for() -> None:
    rows = [row for row in _table(3, 3, 2) if row["column 0"] != row["column 1"]]
    chosen = [rows[index] for index in covering(rows)]
    assert _pairs(chosen) == _pairs(rows)
    assert len(chosen) < len(rows)


def test_one_column_keeps_all_its_values() -> None:
    assert covering(_table(4)) == [0, 1, 2, 3]


def test_without_columns_one_row_is_left() -> None:
    assert covering([{}]) == [0]
    assert covering([]) == []


def test_values_of_the_spread_column_take_turns() -> None:
    rows = _table(6, 3, 2)
    chosen = [rows[index] for index in covering(rows, spread="column 1")]
    others = [{k: v for k, v in row.items() if k != "column 1"} for row in chosen]
    assert len(others) == len(_pairs(others)) == 12
    assert [sum(row["column 1"] == each for row in chosen) for each in range(3)] == [
        4
    ] * 3


def test_the_first_rows_hold_most() -> None:
    rows = [{"a": 0, "b": 0}, {"a": 0, "b": 1}, {"a": 1, "b": 1, "c": 1}]
    assert covering(rows)[0] == 2
