"""Text for people, and numbers that they type."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence


def table(rows: Sequence[Sequence[str]], *, num_text: int) -> str:
    """Return rows as a table; the first ``num_text`` columns to the left, others right.

    Example:
        >>> print(table([("name", "numel"), ("head", "64")], num_text=1))
        name  numel
        head     64
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < num_text else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def positive_int(text: str) -> int:
    """Parse a command-line integer that must be at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def finite_float(text: str, expected: str, fits: Callable[[float], bool]) -> float:
    """Parse a command-line number that ``fits``, which is ``expected`` in words."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not fits(value):
        raise ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value
