"""Backward runs without the GIL, and no Python frame runs in it."""

import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.distributed import distributed, every_strategy
from helpers.groups import groups_destroyed
from helpers.impl import BackwardPrefetch, ShardingStrategy, fsdp
from helpers.models import DIM, Block, Chain, loss_of


def _deep(num_blocks: int = 10, dim: int = DIM) -> Chain:
    return Chain(Block(dim, 2 * dim) for _ in range(num_blocks))


def _sharded(model: nn.Module, use_orig_params: bool, **kwargs: Any) -> Any:
    return fsdp(model, units={Block}, use_orig_params=use_orig_params, **kwargs)


def _grads(model: nn.Module) -> list[list[float]]:
    grads = [param.grad for param in model.parameters()]
    return [grad.flatten().tolist() for grad in grads if grad is not None]


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_python_thread_runs_during_backward(use_orig_params: bool) -> None:
    """A thread counts while the main thread is in a long backward."""
    model = _sharded(_deep(6, 256), use_orig_params)
    x = torch.randn(512, 256)
    loss_of(model(x)).backward()
    loss = loss_of(model(x))
    count = 0
    in_backward = threading.Event()
    done = threading.Event()

    def run() -> None:
        nonlocal count
        in_backward.wait()
        while not done.is_set():
            count += 1

    thread = threading.Thread(target=run)
    thread.start()
    in_backward.set()
    begin, before = time.perf_counter(), count
    loss.backward()
    seconds, during = time.perf_counter() - begin, count - before
    done.set()
    thread.join()
    # A loop of a few Python instructions does more than 1e6 turns per second; cores may
    # be shared by many processes, so a thousandth of that is asked for.
    assert during > 1e3 * seconds, f"{during} turns in {seconds:.3f} s of backward"


@pytest.mark.cpu_only("sees a gradient change through memory that numpy shares")
@every_strategy
@pytest.mark.parametrize("kind", ["bare", "sharded"])
@distributed(world_size=2)
def test_backward_reaches_the_input_while_a_thread_keeps_the_gil(
    kind: str, strategy: str, use_orig_params: bool
) -> None:
    """Nothing in backward waits for the GIL.

    Where forward left whole parameters registered, the first event of backward looks at
    the modules, once: there the thread begins after it.

    The thread takes the GIL when `backward` gives it up, and keeps it (the switch
    interval is longer than the test) until it sees that the gradient of the input,
    the last thing that backward computes, has changed. The graph is retained: to
    free a saved tensor that Python has seen takes the GIL, with any model.
    """
    model: Any = _deep()
    if kind == "sharded":
        model = _sharded(
            model, use_orig_params, sharding_strategy=ShardingStrategy[strategy]
        )
    x = torch.randn(4, 6, requires_grad=True)
    loss_of(model(x)).backward()  # from here on, x.grad is added to in place
    assert x.grad is not None
    seen = x.grad.numpy()
    first = float(seen[0, 0])
    begins = threading.Event()
    looks = kind == "sharded" and strategy == "SHARD_GRAD_OP"
    loss = loss_of(model(x))
    # `Tensor.backward` gives the GIL up once before, to make this gradient.
    one = torch.ones_like(loss)
    engine = torch.autograd.Variable._execution_engine
    outcome = []

    def watch() -> None:
        begins.wait()
        while looks and not model._engine.in_backward and seen[0, 0] == first:
            time.sleep(0)
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            if seen[0, 0] != first:
                outcome.append("changed")
                return
        outcome.append("backward waited for the GIL")

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=watch)
    try:
        # Before the start: a thread that waits for the GIL keeps its old interval.
        sys.setswitchinterval(1000.0)
        thread.start()
        begins.set()
        engine.run_backward(
            (loss,),
            (one,),
            True,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert outcome == ["changed"]


def _frames_of_backward(loss: Tensor) -> list[str]:
    """Return the Python functions that run during ``loss.backward()``."""
    frames: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            frames.append(f"{code.co_filename}:{code.co_name}")

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return frames


@every_strategy
@pytest.mark.parametrize("backward_prefetch", ["BACKWARD_PRE", "BACKWARD_POST", None])
@distributed(world_size=2)
def test_no_python_frame_runs(
    backward_prefetch: str | None, strategy: str, use_orig_params: bool
) -> None:
    """The same frames as for the bare model: those of `Tensor.backward` itself."""
    bare = _deep(4)
    x = torch.randn(4, 6)
    for _ in range(2):
        expected = _frames_of_backward(loss_of(bare(x)))
    model = _sharded(
        _deep(4),
        use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
        backward_prefetch=backward_prefetch and BackwardPrefetch[backward_prefetch],
    )
    for step in range(3):
        assert _frames_of_backward(loss_of(model(x))) == expected, step
    with model.no_sync():
        loss = loss_of(model(x))
        assert _frames_of_backward(loss) == expected
    assert _frames_of_backward(loss_of(model(x))) == expected


@pytest.mark.cpu_only("on a device no collective makes the host wait")
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_ranks_begin_the_backwards_of_two_threads_in_other_orders(
    rank: int, use_orig_params: bool
) -> None:
    """Each rank's first backward waits for the other rank's second one."""
    with groups_destroyed():
        models = [
            _sharded(_deep(2), use_orig_params, process_group=dist.new_group())
            for _ in range(2)
        ]
        x = torch.randn(4, 6)
        for model in models:
            loss_of(model(x)).backward()
        alone = [_grads(model) for model in models]
        for model in models:
            model.zero_grad()
        losses = [loss_of(model(x)) for model in models]
        first = threading.Thread(target=losses[rank].backward)
        first.start()
        while not models[rank]._engine.in_backward:
            time.sleep(0.01)
        time.sleep(0.2)  # it is in a collective
        losses[1 - rank].backward()
        first.join()
        assert [_grads(model) for model in models] == alone
        del models, model, losses, first
