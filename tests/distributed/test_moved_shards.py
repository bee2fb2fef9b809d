"""Memory of shards that torch moves, or that the user replaces.

`share_memory_()` and queues of torch.multiprocessing put other memory into the storage
of a tensor. The shard lies there from then on. What would lose its values, or change
nothing, is refused by name. Compared with the unsharded model.
"""

from collections.abc import Callable
from multiprocessing import resource_sharer
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from fsdp_c import reset
from helpers.distributed import distributed
from helpers.models import BATCH, DIM, Inputs
from helpers.rows import as_double, in_either_api

APIS = ("FSDP", "FSDP flat", "fully_shard")
WIDTH = 64  # its unit is read in place, by two ranks


class _Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, WIDTH), nn.Tanh(), nn.Linear(WIDTH, DIM))


class _Net(nn.Sequential):
    """A unit that is large enough to be read in place, and a small root."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, DIM), _Wide(), nn.Linear(DIM, 3))


def _inputs(generator: torch.Generator) -> Inputs:
    return as_double((torch.randn(BATCH, DIM, generator=generator),))


def _locals(params: list[nn.Parameter]) -> list[Tensor]:
    return [
        (param.to_local() if hasattr(param, "to_local") else param).detach()
        for param in params
    ]


def _share(params: list[nn.Parameter]) -> None:
    for local in _locals(params):
        local.share_memory_()
        assert local.is_shared()


@pytest.mark.cpu_only("memory of a device is shared in another way")
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=(1, 2))
def test_shared_between_steps(api: str, strategy: str) -> None:
    """Training, evaluation and the optimizer go on with the new memory."""
    both = in_either_api(api, _Net, {_Wide}, _inputs, strategy=strategy)
    params = list(both.model.parameters())
    both.train(1)
    for _ in range(2):
        _share(params)
        both.evaluate()
        both.train(2)


@pytest.mark.cpu_only("memory of a device is shared in another way")
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=(1, 2))
def test_shared_before_backward(api: str, strategy: str) -> None:
    """The parameters that the optimizer has, once gathered and once not yet."""
    both = in_either_api(api, _Net, {_Wide}, _inputs, strategy=strategy)
    params = list(both.model.parameters())
    for _ in range(3):
        both.zero_grad()
        both.forward_backward(inside=lambda: _share(params))
        both.checked_step()


# Weights for another process ----------------------------------------------------


def _send_sums(inbox: Any, outbox: Any) -> None:
    """Answer each tensor by its sum; in a child process."""
    for tensor in iter(inbox.get, None):
        outbox.put(float(tensor.sum()))


class _Child:
    """A process that is sent tensors; forked, and uses no model of its parent's."""

    def __init__(self) -> None:
        context = mp.get_context("fork")
        self.inbox, self.outbox = context.SimpleQueue(), context.SimpleQueue()
        self.process = context.Process(
            target=_send_sums, args=(self.inbox, self.outbox), daemon=True
        )
        self.process.start()

    def sum_of(self, tensor: Tensor) -> float:
        self.inbox.put(tensor)
        total: float = self.outbox.get()
        return total

    def end(self) -> None:
        self.inbox.put(None)
        self.process.join(10)
        assert self.process.exitcode == 0
        resource_sharer.stop(timeout=10)  # its thread


@pytest.mark.cpu_only("memory of a device is shared in another way")
@pytest.mark.parametrize("api", APIS)
@distributed(world_size=(1, 2))
def test_sent_to_a_process(api: str) -> None:
    """A queue shares the parameters that it is given, between any two calls."""
    both = in_either_api(api, _Net, {_Wide}, _inputs)
    child = _Child()
    params = list(both.model.parameters())

    def send() -> None:
        for local in _locals(params):
            assert child.sum_of(local) == float(local.sum())

    for _ in range(2):
        both.zero_grad()
        both.forward_backward(inside=send)
        both.checked_step()
        send()
        both.evaluate()
    child.end()


# What is refused ----------------------------------------------------------------


def _empty_one(model: nn.Module) -> None:
    """Empty the storage of the root's first weight, and of all that are in it."""
    local = _locals([next(p for p in model.parameters() if p.numel() > 0)])[0]
    local.untyped_storage().resize_(0)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("has_run", [False, True])
@distributed(world_size=(1, 2))
def test_storages_that_are_emptied(api: str, has_run: bool) -> None:
    """The error names the unit, also before the first forward, and the remedy."""
    both = in_either_api(api, _Net, {_Wide}, _inputs)
    if has_run:
        both.forward_backward()
    _empty_one(both.model)
    x = torch.ones(BATCH, DIM, dtype=torch.float64)
    with pytest.raises(
        (ValueError, RuntimeError), match=r"FSDP.*unit '\w*_Net'.* 0 bytes.*expected"
    ):
        both.model(x)
    reset(both.model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=(1, 2))
def test_new_data_of_sharded_parameters(strategy: str) -> None:
    """Of a DTensor it changes nothing, in torch either: an error says what does."""
    both = in_either_api("fully_shard", _Net, {_Wide}, _inputs, strategy=strategy)
    both.train(1)
    param = both.model[1][0].weight
    x = torch.ones(BATCH, DIM, dtype=torch.float64)
    param.data = 2 * param.detach()
    with pytest.raises(ValueError, match=r"unit '1'.*data of parameter 0.*copy_"):
        both.model(x)
    reset(both.model)
    both.zero_grad()
    both.train(1)  # it was told once


# What is taken over -------------------------------------------------------------


def _halve_by_data(model: Any) -> None:
    for param in model.parameters():
        param.data = 0.5 * param.detach()


def _halve_local_tensors(model: Any) -> None:
    for param in model.parameters():
        param._local_tensor = 0.5 * param._local_tensor.detach()


def _halve_shared(model: Any) -> None:
    """Put new values into memory that was moved."""
    params = list(model.parameters())
    _share(params)
    for local in _locals(params):
        local.mul_(0.5)


HALVES: dict[str, tuple[tuple[str, ...], Callable[[Any], None]]] = {
    "data": (("FSDP", "FSDP flat"), _halve_by_data),
    "local tensor": (("fully_shard",), _halve_local_tensors),
    "shared": (APIS, _halve_shared),
}


@pytest.mark.cpu_only("memory of a device is shared in another way")
@pytest.mark.parametrize(
    ("how", "api"), [(how, api) for how, (apis, _) in HALVES.items() for api in apis]
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=(1, 2))
def test_new_values(how: str, api: str, strategy: str) -> None:
    """They are trained on, and the optimizer steps them."""
    both = in_either_api(api, _Net, {_Wide}, _inputs, strategy=strategy)
    for _ in range(2):
        both.train(1)
        with torch.no_grad():
            HALVES[how][1](both.model)
            for param in both.reference.parameters():
                param.mul_(0.5)
        both.evaluate()
        both.train(1)
