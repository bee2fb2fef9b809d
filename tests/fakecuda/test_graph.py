"""Graphs of the fake CUDA: they replay, and refuse what CUDA refuses."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fakecuda.device import needs_fake, on_device, schedules

pytestmark = needs_fake

NUM_SEEDS = 10


@contextlib.contextmanager
def capture() -> Iterator[Any]:
    """Capture on a stream of its own."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with stream:
        graph.capture_begin()
        try:
            yield graph
        finally:
            graph.capture_end()


@on_device
def test_replays_follow_the_values() -> None:
    for _ in schedules(NUM_SEEDS):
        x = torch.zeros(4, 4)
        total = torch.zeros(4, 4)
        with capture() as graph:
            side = torch.cuda.Stream()
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                y = x.exp() @ x
            torch.accelerator.current_stream().wait_stream(side)
            y.record_stream(side)
            z = y.sum(0)
            total += z
        assert total.tolist() == torch.zeros(4, 4).tolist()  # nothing has run
        expected = torch.zeros(4, 4, device="cpu")
        for step in range(4):
            value = torch.full((4, 4), 0.25 * step, device="cpu")
            x.copy_(value, non_blocking=True)
            graph.replay()
            expected += (value.exp() @ value).sum(0)
            assert torch.equal(z.cpu(), (value.exp() @ value).sum(0))
        assert torch.equal(total.cpu(), expected)


def refuse(match: str, body: Any) -> None:
    with pytest.raises(RuntimeError, match=match), capture():
        body()
    with capture() as graph:  # a failed one leaves nothing behind
        x = torch.ones(3)
    graph.replay()
    assert x.tolist() == [1, 1, 1]


@on_device
def test_what_a_capture_refuses() -> None:
    x = torch.ones(3)
    outside = torch.accelerator.current_stream().record_event()
    inside: list[torch.Event] = []

    def fork_only() -> None:
        torch.cuda.Stream().wait_stream(torch.accelerator.current_stream())

    def ask() -> None:
        inside.append(torch.accelerator.current_stream().record_event())
        inside[0].query()

    refuse("an event from outside the capture", outside.wait)
    refuse("not permitted while a stream is capturing", torch.cuda.synchronize)
    refuse("the host waits for a capturing stream", lambda: (x + 1).sum().item())
    refuse("unless the CPU tensor is pinned", x.cpu)
    refuse("the host waits for a capturing stream", x.nonzero)
    refuse("was not joined", fork_only)
    refuse("a question about captured work", ask)
    with pytest.raises(RuntimeError, match="recorded in a capture"):
        inside[0].synchronize()
    with pytest.raises(RuntimeError, match="only one of the event and the stream"):
        inside[0].wait()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="captured on a non-default stream"):
        graph.capture_begin()
    other = torch.cuda.Stream()
    with capture(), other, pytest.raises(RuntimeError, match="another graph is being"):
        graph.capture_begin()


@on_device
def test_memory_of_a_graph() -> None:
    """What a capture freed is used again in it, and by nobody else."""
    with capture() as graph:
        x = torch.ones(1024)
        address = x.data_ptr()
        y = x * 2
        del x
        z = torch.full((1024,), 5.0)
        assert z.data_ptr() == address
    del z
    others = [torch.empty(1024) for _ in range(10)]
    assert address not in {other.data_ptr() for other in others}
    for _ in range(3):
        graph.replay()
        assert set(y.tolist()) == {2}


@on_device
def test_memory_that_was_freed_too_early() -> None:
    """What a graph reads must live as long as the graph."""
    x = torch.ones(1000)
    with capture() as graph:
        y = x * 2
    address = x.data_ptr()
    del x
    other = torch.empty(1000)
    assert other.data_ptr() == address
    graph.replay()
    assert y.isnan().all()
