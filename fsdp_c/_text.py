"""Text for people."""

from collections.abc import Sequence


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
