"""A step that failed on all ranks, or before it communicated: reset and go on.

Afterwards training equals that of a model which never saw the failed step.
"""

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fsdp_c import reset
from helpers.distributed import distributed
from helpers.models import BATCH, DIM, MLP, Block
from helpers.reference import Differential
from helpers.rows import APIS, in_either_api, shard_units
from helpers.transports import OWN, over


class _MistakeError(Exception):
    """What the tests raise."""


def _mistake() -> None:
    raise _MistakeError


def _out_of_memory() -> None:
    """As a device's allocator raises it."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")


def _absurd_allocation() -> None:
    """The CPU's allocator raises a RuntimeError."""
    torch.empty(1 << 60, dtype=torch.uint8)


_FAILURES: dict[str, tuple[Callable[[], None], type[Exception], str]] = {
    "mistake": (_mistake, _MistakeError, ""),
    "out of memory": (_out_of_memory, torch.OutOfMemoryError, "CUDA out of memory"),
    "absurd allocation": (_absurd_allocation, RuntimeError, "memory|allocate"),
}


class _FailsInBackward(torch.autograd.Function):
    """An identity whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: Callable[[], None]) -> Tensor:
        ctx.fail = fail
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.fail()
        return (*grads, None)


def _fail_at(
    place: str, model: nn.Module, fail: Callable[[], None]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Let the next step fail at ``place``; the handles take that back."""
    block = next(m for m in list(model.modules())[-1:0:-1] if isinstance(m, Block))
    first = next(m for m in model.modules() if isinstance(m, Block))

    def in_module(*_: Any) -> None:
        fail()

    def in_backward(_module: Any, _args: Any, output: Tensor) -> Tensor:
        return _FailsInBackward.apply(output, fail)

    def hook_output(_module: Any, _args: Any, output: Tensor) -> None:
        output.register_hook(in_module)

    if place == "forward":  # inside of the last unit
        return [block.fc1.register_forward_hook(in_module)]
    if place == "first forward":
        return [first.register_forward_pre_hook(in_module)]
    if place == "last backward":  # inside of the unit that backward enters first
        return [block.fc1.register_forward_hook(in_backward)]
    if place == "backward":
        return [first.fc1.register_forward_hook(in_backward)]
    assert place == "hook"  # of the user's, on a tensor
    return [first.fc1.register_forward_hook(hook_output)]


def _batch() -> Tensor:
    return torch.ones(BATCH, DIM, dtype=torch.float64)


def _make(api: str = "FSDP", strategy: str = "FULL_SHARD") -> Differential:
    return in_either_api(api, MLP, {Block}, strategy=strategy)


def _reset(differential: Differential) -> None:
    """Do what docs/guide/failures.md says."""
    reset(differential.model)
    differential.optimizer.zero_grad()
    differential.reference_optimizer.zero_grad()


def _step_fails(differential: Differential, place: str, failure: str) -> None:
    """Let a step fail at ``place``, with the exception's own type, and reset."""
    fail, kind, message = _FAILURES[failure]
    handles = _fail_at(place, differential.model, fail)
    with pytest.raises(kind, match=message):
        differential.model(_batch()).sum().backward()
    for handle in handles:
        handle.remove()
    _reset(differential)


def _go_on(differential: Differential) -> None:
    differential.train(2)
    differential.accumulate(2, no_sync=True)
    differential.evaluate()


# Over gloo only one: what fails does not know what carries the collectives.
@pytest.mark.parametrize(
    ("transport", "failure"),
    [*((OWN, failure) for failure in _FAILURES), ("c10d", "mistake")],
)
@pytest.mark.parametrize(
    "place", ["first forward", "forward", "last backward", "backward", "hook"]
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("api", APIS)
@distributed(world_size=(2, 3))
def test_on_all_ranks(
    transport: str, strategy: str, api: str, place: str, failure: str
) -> None:
    """The exception keeps its type; the next steps are right."""
    with over(transport):
        differential = _make(api, strategy)
        differential.train(2)
        _step_fails(differential, place, failure)
        _go_on(differential)
        del differential


@pytest.mark.parametrize("transport", [OWN, "c10d"])
@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_several_failures(transport: str, api: str) -> None:
    with over(transport):
        differential = _make(api)
        for place in ("backward", "forward", "last backward", "backward"):
            _step_fails(differential, place, "mistake")
            differential.train(1)
        _go_on(differential)
        del differential


@pytest.mark.parametrize("transport", [OWN, "c10d"])
@distributed(world_size=2)
def test_in_an_accumulation(transport: str) -> None:
    """The micro-batches before the failed one go with it: all are repeated."""
    with over(transport):
        differential = _make()
        differential.train(1)
        for is_quiet in (True, False):
            with differential.no_sync(is_quiet):
                differential.model(_batch()).sum().backward()
            _step_fails(differential, "backward", "mistake")
            _go_on(differential)
        del differential


@pytest.mark.parametrize("transport", [OWN, "c10d"])
@pytest.mark.parametrize("failure", list(_FAILURES))
@distributed(world_size=(2, 3))
def test_on_one_rank_between_forward_and_backward(
    rank: int, world_size: int, transport: str, failure: str
) -> None:
    """A loss that only one rank cannot compute: the ranks agree to leave it out."""
    with over(transport):
        fail, kind, _ = _FAILURES[failure]
        differential = _make()
        differential.train(1)
        for bad_rank in range(world_size):
            loss = differential.model(_batch()).sum()
            has_failed = torch.zeros((), dtype=torch.int32)
            try:
                if rank == bad_rank:
                    fail()
            except kind:
                has_failed += 1
            dist.all_reduce(has_failed)
            assert has_failed == 1
            del loss
            _reset(differential)
            differential.train(1)
        _go_on(differential)
        del differential


@pytest.mark.parametrize("reshards", [True, False])
@distributed(world_size=2)
def test_after_a_forward_under_fully_shard(reshards: bool) -> None:
    """What modules kept for the backward is no longer registered."""
    model = shard_units(MLP().double(), {Block}, reshard_after_forward=reshards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(_batch()).sum().backward()
    optimizer.step()
    sharded = list(model.parameters())
    model(_batch())
    reset(model)
    assert all(map(operator.is_, model.parameters(), sharded))
    assert get_optimizer_state_dict(model, optimizer)["state"]


@pytest.mark.parametrize("transport", [OWN, "c10d"])
@distributed(world_size=2)
def test_parameters_and_optimizer_state_survive(transport: str) -> None:
    """A failed step changes neither, bit by bit."""
    with over(transport):
        differential = _make()
        differential.train(2)
        params = [p.detach().clone() for p in differential.model.parameters()]
        state = copy.deepcopy(differential.optimizer.state_dict())
        _step_fails(differential, "backward", "mistake")
        for param, before in zip(differential.model.parameters(), params, strict=True):
            assert param.grad is None
            assert torch.equal(param, before)
        torch.testing.assert_close(
            differential.optimizer.state_dict(), state, rtol=0, atol=0
        )
        del differential
