"""Text for people, and what they type: numbers and commands."""

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
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


def folder_commands(
    parser: ArgumentParser, operand: str, meaning: str
) -> Callable[[str, Callable[[Namespace], None], str], ArgumentParser]:
    """Return a function that adds a command, of a name, what runs it, and its help.

    Each command takes a folder, the ``operand``, and is ``run`` in what is parsed.
    """
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[Namespace], None], text: str) -> ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument(operand.lower(), metavar=operand, help=meaning)
        return command

    return add
