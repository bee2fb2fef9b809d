"""Progress bars: on rank 0, on a terminal, if tqdm is installed."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress(
    label: str, total_nbytes: int, is_on: bool | None = None
) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with the number of bytes done since the last call.

    ``is_on``: whether to show a bar; None: if stderr is a terminal.
    """
    if is_on is None:
        is_on = sys.stderr is not None and sys.stderr.isatty()
    if is_on:
        try:
            tqdm: Any = importlib.import_module("tqdm").tqdm
        except ImportError:
            is_on = False
    if not is_on:
        yield lambda _: None
        return
    # Without tqdm's monitor thread.
    quiet = type("Bar", (tqdm,), {"monitor_interval": 0})
    with quiet(
        desc=label, total=total_nbytes, unit="B", unit_scale=True, file=sys.stderr
    ) as bar:
        yield lambda nbytes: bar.update(min(nbytes, total_nbytes - bar.n))
        bar.update(total_nbytes - bar.n)
