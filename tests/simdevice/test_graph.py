"""Graphs of the simulated device: they replay, and refuse what CUDA refuses."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from helpers.distributed import distributed
from simdevice.device import native

NUM_SEEDS = 10


def sim_test(body):
    """Run the body in a process that has the device."""
    return distributed(world_size=1, device="sim")(body)


@contextlib.contextmanager
def capture() -> Iterator[Any]:
    """Capture on a stream of its own."""
    graph = native().Graph()
    stream = torch.Stream("sim")
    native().synchronize()
    with stream:
        graph.capture_begin()
        try:
            yield graph
        finally:
            graph.capture_end()


@sim_test
def test_replays_follow_the_values() -> None:
    for seed in range(NUM_SEEDS):
        native().set_schedule(seed, 1.0)
        x = torch.zeros(4, 4)
        total = torch.zeros(4, 4)
        with capture() as graph:
            side = torch.Stream("sim")
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


@sim_test
def test_what_a_capture_refuses() -> None:
    x = torch.ones(3)
    outside = torch.accelerator.current_stream().record_event()
    inside: list[torch.Event] = []

    def fork_only() -> None:
        torch.Stream("sim").wait_stream(torch.accelerator.current_stream())

    def ask() -> None:
        inside.append(torch.accelerator.current_stream().record_event())
        inside[0].query()

    refuse("an event from outside the capture", outside.wait)
    refuse("the host must not wait", native().synchronize)
    refuse("the host must not wait", lambda: (x + 1).sum().item())
    refuse("the host must not wait", x.cpu)
    refuse("the host must not wait", x.nonzero)
    refuse("was not joined", fork_only)
    refuse("a question about captured work", ask)
    with pytest.raises(RuntimeError, match="recorded in a capture"):
        inside[0].synchronize()
    inside[0].wait()
    with pytest.raises(RuntimeError, match="recorded in a capture"):
        native().synchronize()
    graph = native().Graph()
    with pytest.raises(RuntimeError, match="the default stream cannot be captured"):
        graph.capture_begin()
    other = torch.Stream("sim")
    with capture(), other, pytest.raises(RuntimeError, match="another graph is being"):
        graph.capture_begin()


def held_nbytes() -> int:
    native().synchronize()
    native().empty_cache()
    return int(native().memory_stats()["held_nbytes"])


@sim_test
def test_memory_of_a_graph() -> None:
    before = held_nbytes()
    with capture() as graph:
        x = torch.ones(1024)
        address = x.data_ptr()
        y = x * 2
        del x
        z = torch.full((1024,), 5.0)  # its memory again, behind poison
        assert z.data_ptr() == address
    del z
    for _ in range(3):
        graph.replay()
        assert set(y.tolist()) == {2}
    assert held_nbytes() == before + 2 * 4096  # that of `z` is still the graph's
    others = [torch.empty(1024) for _ in range(10)]
    assert address not in {other.data_ptr() for other in others}
    del y, others
    assert held_nbytes() == before + 2 * 4096
    graph.reset()
    assert held_nbytes() == before


@sim_test
def test_memory_that_was_freed_too_early() -> None:
    """What a graph reads must live as long as the graph."""
    x = torch.ones(1000)
    with capture() as graph:
        y = x * 2
    del x
    graph.replay()
    assert y.isnan().all()
