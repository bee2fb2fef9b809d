"""Note [Stream of a step] in step_stream.hpp: steps on several streams.

Each body waits where the unsharded model would need it, and nowhere else.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_c
from fakecuda.device import needs_cuda, schedules
from helpers.distributed import distributed
from helpers.impl import FSDP, fsdp

pytestmark = needs_cuda

NUM_SEEDS = 8
NUM_STEPS = 3
NUM_LAYERS = 4
DIM = 24
WORLD_SIZE = 2
ROWS = 4  # of a rank's batch
WRAPPERS = ("original", "flat", "fully_shard")


class Branches(nn.Module):
    """Two outputs, of which ``stream`` makes the second."""

    stream: Any = None

    def __init__(self) -> None:
        super().__init__()
        weights = (torch.randn(DIM, DIM) / DIM**0.5 for _ in range(2))
        self.weights = nn.ParameterList(weights)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        current = torch.accelerator.current_stream()
        stream = current if self.stream is None else self.stream
        stream.wait_stream(current)
        x.record_stream(stream)
        with stream:
            second = x @ self.weights[1]
        current.wait_stream(stream)
        second.record_stream(current)
        return x @ self.weights[0], second


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = Branches()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.branches(x)
        return torch.tanh(first + second)


def chain(layer: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(layer() for _ in range(NUM_LAYERS)))


def linears() -> nn.Sequential:
    return chain(lambda: nn.Linear(DIM, DIM))


def wrap(model: nn.Sequential, wrapper: str, strategy: str = "FULL_SHARD") -> nn.Module:
    """Shard the model, with a unit for each layer that gathers when it is needed."""
    if wrapper == "fully_shard":
        for layer in model:
            fsdp_c.fully_shard(layer)
        return fsdp_c.fully_shard(model)
    return fsdp(
        model,
        units=[nn.Linear, Branches],
        strategy=strategy,
        use_orig_params=wrapper == "original",
        backward_prefetch=None,
    )


def pairs(
    make: Callable[[], nn.Sequential] = linears,
    wrapper: str = "original",
    strategy: str = "FULL_SHARD",
) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield an unsharded model and a sharded one for each of the device's schedules."""
    for seed in schedules(NUM_SEEDS):
        reference = make()
        model = wrap(copy.deepcopy(reference), wrapper, strategy)
        yield f"seed {seed}", reference, model
        del model


def grads(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients, whole."""
    if isinstance(model, fsdp_c.FSDPModule):
        return [param.grad.full_tensor() for param in model.parameters()]
    with FSDP.summon_full_params(model, with_grads=True):
        return [param.grad.clone() for param in model.parameters()]


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows, and those of all ranks."""
    rows = torch.randn(WORLD_SIZE * ROWS, DIM)
    return rows[rank * ROWS :][:ROWS], rows


def check_grads(
    model: nn.Module,
    reference: nn.Module,
    batches: Sequence[torch.Tensor],
    name: str,
) -> None:
    """Compare with the gradients that the batches add to those of the unsharded.

    Then clear both.
    """
    for each in batches:
        reference(each).square().mean().backward()
    expected = [param.grad for param in reference.parameters()]
    torch.testing.assert_close(
        grads(model), expected, msg=lambda text: f"{name}: {text}"
    )
    model.zero_grad()
    reference.zero_grad()


def keep_busy() -> None:
    """Let what the current stream does next come late."""
    x = torch.zeros(DIM)
    for _ in range(12):
        x = x + 1


def use_freed_memory() -> None:
    """Write into what the current stream may have again."""
    _ = [torch.full((DIM, DIM), 7.0) for _ in range(16)]


# Streams of autograd's nodes --------------------------------------------------


@distributed(world_size=WORLD_SIZE, device="cuda")
def test_gradients_on_the_stream_of_an_older_graph(rank: int) -> None:
    for name, reference, model in pairs():
        stream, current = torch.cuda.Stream(), torch.accelerator.current_stream()
        graph = model(batch(rank)[0])
        for step in range(NUM_STEPS):
            mine, whole = batch(rank)
            stream.wait_stream(current)
            with stream:
                model(mine).square().mean().backward()
            current.wait_stream(stream)
            check_grads(model, reference, [whole], f"{name}, step {step}")
        del graph


@pytest.mark.parametrize("is_one", [False, True], ids=["backwards", "one_backward"])
@distributed(world_size=WORLD_SIZE, device="cuda")
def test_forwards_on_two_streams(rank: int, is_one: bool) -> None:
    for name, reference, model in pairs():
        streams = [torch.cuda.Stream() for _ in range(2)]
        current = torch.accelerator.current_stream()
        for step in range(NUM_STEPS):
            batches = [batch(rank) for _ in streams]
            losses = []
            for stream, (mine, _) in zip(streams, batches, strict=True):
                stream.wait_stream(current)
                with stream:
                    losses.append(model(mine).square().mean())
            for stream in streams:
                current.wait_stream(stream)
            for loss in [torch.stack(losses).sum()] if is_one else losses:
                loss.backward()
            wholes = [whole for _, whole in batches]
            check_grads(model, reference, wholes, f"{name}, step {step}")


@distributed(world_size=WORLD_SIZE, device="cuda")
def test_a_forward_beside_one_of_another_stream(rank: int) -> None:
    """The second forward gathers anew what the first, which is late, had kept."""
    for name, reference, model in pairs(strategy="SHARD_GRAD_OP"):
        streams = [torch.cuda.Stream() for _ in range(2)]
        current = torch.accelerator.current_stream()
        for step in range(NUM_STEPS):
            batches = [batch(rank) for _ in streams]
            losses = []
            for stream in streams:
                stream.wait_stream(current)
            with streams[0]:
                for _ in range(5):
                    keep_busy()
            for stream, (mine, _) in zip(streams, batches, strict=True):
                with stream:
                    losses.append(model(mine).square().mean())
            for stream, loss in zip(streams, losses, strict=True):
                current.wait_stream(stream)
                loss.backward()
            wholes = [whole for _, whole in batches]
            check_grads(model, reference, wholes, f"{name}, step {step}")


@distributed(world_size=WORLD_SIZE, device="cuda")
def test_blocks_of_a_stream_that_is_left(rank: int) -> None:
    """A step in no_sync() keeps them for one on another stream, which is late."""
    for name, reference, model in pairs(strategy="SHARD_GRAD_OP"):
        streams = [torch.cuda.Stream() for _ in range(2)]
        current = torch.accelerator.current_stream()
        for step in range(NUM_STEPS):
            mine, whole = batch(rank)
            for stream in streams:
                stream.wait_stream(current)
            with streams[0], model.no_sync():
                model(mine).square().mean().backward()
            with streams[1]:
                for _ in range(5):
                    keep_busy()
                model(mine).square().mean().backward()
            with streams[0]:
                use_freed_memory()
            for stream in streams:
                current.wait_stream(stream)
            check_grads(model, reference, [whole] * 2, f"{name}, step {step}")


@distributed(world_size=WORLD_SIZE, device="cuda")
def test_outputs_of_a_unit_on_two_streams(rank: int) -> None:
    for name, reference, model in pairs(lambda: chain(Joined)):
        stream = torch.cuda.Stream()
        for module in model.modules():
            if isinstance(module, Branches):
                module.stream = stream
        for step in range(NUM_STEPS):
            mine, whole = batch(rank)
            model(mine).square().mean().backward()
            check_grads(model, reference, [whole], f"{name}, step {step}")


@distributed(world_size=WORLD_SIZE, device="cuda")
def test_steps_on_changing_streams(rank: int) -> None:
    """Backward is called on the default stream, where the gradients are read."""
    for name, reference, model in pairs():
        stream, current = torch.cuda.Stream(), torch.accelerator.current_stream()
        for step in range(2 * NUM_STEPS):
            mine, whole = batch(rank)
            stream.wait_stream(current)
            with current if step % 2 else stream:
                loss = model(mine).square().mean()
            current.wait_stream(stream)
            loss.backward()
            check_grads(model, reference, [whole], f"{name}, step {step}")


# Memory of another stream -----------------------------------------------------


@contextlib.contextmanager
def another_stream() -> Iterator[None]:
    """Run the body on a stream on which the work is late; the current one waits.

    It does so after it has used what the body let go of its memory.
    """
    stream, current = torch.cuda.Stream(), torch.accelerator.current_stream()
    stream.wait_stream(current)
    with stream:
        for _ in range(5):
            keep_busy()
        yield
    use_freed_memory()
    current.wait_stream(stream)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@distributed(world_size=WORLD_SIZE, device="cuda")
def test_wrapping_on_another_stream_than_the_parameters(wrapper: str) -> None:
    for seed in schedules(NUM_SEEDS):
        reference = linears()
        model: nn.Module = copy.deepcopy(reference)
        x = torch.randn(ROWS, DIM)
        with another_stream():
            model = wrap(model, wrapper)
            found = model(x)
        torch.testing.assert_close(found, reference(x), msg=f"seed {seed}")


@distributed(world_size=WORLD_SIZE, device="cuda")
def test_first_step_on_another_stream_than_fully_shard() -> None:
    for name, reference, model in pairs(wrapper="fully_shard"):
        x = torch.randn(ROWS, DIM)
        with another_stream():
            found = model(x)
        torch.testing.assert_close(found, reference(x), msg=name)


def replace_params(model: nn.Module, factor: float) -> None:
    """Let this rank's parts of the parameters have new memory."""
    for param in model.parameters():
        mine: Any = param
        if isinstance(param, DTensor):
            mine = param._local_tensor
        mine.data = mine.data * factor


@pytest.mark.parametrize("wrapper", WRAPPERS)
@distributed(world_size=WORLD_SIZE, device="cuda")
def test_step_on_another_stream_than_new_parameters(wrapper: str) -> None:
    for name, reference, model in pairs(wrapper=wrapper):
        x = torch.randn(ROWS, DIM)
        model(x)
        for each in (model, reference):
            replace_params(each, 0.5)
        with another_stream():
            found = model(x)
        torch.testing.assert_close(found, reference(x), msg=name)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@distributed(world_size=WORLD_SIZE, device="cuda")
def test_backward_on_another_stream_than_new_gradients(wrapper: str) -> None:
    for name, reference, model in pairs(wrapper=wrapper):
        x = torch.randn(ROWS, DIM)
        for each in (model, reference):
            for param in each.parameters():
                param.grad = torch.ones_like(param)
        with another_stream():
            model(x).square().mean().backward()
        check_grads(model, reference, [x], name)
