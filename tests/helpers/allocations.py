"""Counts the bytes that torch's CPU allocator hands out, by torch's profiler."""

import contextlib
from collections.abc import Iterator

from torch.profiler import ProfilerActivity, profile


class Allocations:
    """Since the beginning, at the end of :func:`counted`."""

    def __init__(self) -> None:
        self.peak_nbytes = 0
        self.left_nbytes = 0


@contextlib.contextmanager
def counted() -> Iterator[Allocations]:
    """Count what this process allocates in the context."""
    result = Allocations()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield result
    assert profiler.profiler is not None
    events = [
        event
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    for event in sorted(events, key=lambda event: event.start_ns()):
        result.left_nbytes += event.nbytes()
        result.peak_nbytes = max(result.peak_nbytes, result.left_nbytes)
