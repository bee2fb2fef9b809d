"""Trace: what several ranks recorded, and what can be made of it."""

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdp_c.tools.trace._chrome import chrome_trace
from fsdp_c.tools.trace._data import Recorded, check_ranks, read_folder, write_json
from fsdp_c.tools.trace._lanes import Lanes, lanes_of
from fsdp_c.tools.trace._numbers import Numbers, numbers_of
from fsdp_c.tools.trace._picture import draw
from fsdp_c.tools.trace._summary import summary


class Trace:
    """What one or several ranks recorded.

    Attributes:
        recorded: One per rank, in rank order.
    """

    def __init__(self, recorded: Sequence[Recorded]) -> None:
        """Take what ranks of one run recorded.

        Args:
            recorded: One per rank, in any order.

        Raises:
            TraceError: They are of several runs, or several are of one rank.
        """
        self.recorded = check_ranks(recorded)

    @cached_property
    def lanes(self) -> list[Lanes]:
        """Steps, compute, collectives and waits, per rank."""
        return [lanes_of(each) for each in self.recorded]

    def numbers(self) -> Numbers:
        """Return where the time of the steps went, in ns per step."""
        return numbers_of(self.lanes)

    def summary(self) -> str:
        """Return that in words, and what to try."""
        return summary(self.lanes)

    def chrome(self) -> dict[str, Any]:
        """Return the content of a trace-event file, for Perfetto."""
        return chrome_trace(self.lanes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a trace-event file of these ranks, for Perfetto.

        Args:
            path: Of the file, which is replaced if it is there.

        Raises:
            OSError: It cannot be written.
        """
        write_json(Path(path), self.chrome())

    def draw(self, path: str | os.PathLike[str], *, step: int | None = None) -> None:
        """Draw one step, by default the last, of up to four ranks.

        Args:
            path: The name's end says the format: .png, .svg, .pdf.
            step: 0 is the first that was recorded.

        Raises:
            ImportError: matplotlib is not installed.
            TraceError: There is no such step.
        """
        draw(self.lanes, path, step=step)


def load(folder: str | os.PathLike[str]) -> Trace:
    """Return what all ranks wrote in ``folder``.

    Args:
        folder: The one that ``start`` or ``record`` was given.

    Raises:
        OSError: ``folder`` cannot be read.
        TraceError: It holds no traces, or they are not of one run.
    """
    return Trace(read_folder(folder))
