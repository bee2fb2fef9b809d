"""Spans of rounds of whole parameters, which fsdp_c.trace shows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fsdp_c import _native
from fsdp_c._units.owner import Owner
from fsdp_c._whole.owned import WholeParam

GATHER, STEP, SCATTER = "gather_wholes", "step_wholes", "scatter_wholes"


@contextmanager
def span(
    owner: Owner | None, kind: str, members: Sequence[WholeParam]
) -> Iterator[None]:
    """Record what is done for ``members``, while ``owner``'s engine is recorded."""
    running = None if owner is None else owner._running
    if running is None or not running[0].is_recording:
        yield
        return
    engine, number = running[0], _native.TIMELINE_KINDS.index(kind)
    begin_ns, mark = engine.begin_wholes(number)
    yield
    engine.end_wholes(number, begin_ns, mark, sum(_nbytes(kind, w) for w in members))


def _nbytes(kind: str, whole: WholeParam) -> int:
    """Return the bytes of what is moved, or stepped, over all ranks."""
    nbytes = whole.shape.numel() * whole.part.param.itemsize
    if kind == GATHER:
        return 2 * nbytes if whole.travels else 0
    if kind == SCATTER:
        return nbytes if whole.travels or whole.grid.num_replicas > 1 else 0
    return nbytes
