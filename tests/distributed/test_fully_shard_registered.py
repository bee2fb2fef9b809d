"""fully_shard: which parameters are registered between forward and backward.

torch documents it: what is not resharded after forward is there whole until backward,
or until reshard(). `Rows.check` sees that after backward the sharded ones are.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn import functional

from fsdp_c import fully_shard
from helpers.distributed import TEST_DEVICE, distributed
from helpers.models import DIM, vectors
from helpers.rows import Rows


class Model(nn.Module):
    """Two units and a head, which the root has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 5)
        self.second = nn.Linear(5, DIM)
        self.head = nn.Linear(DIM, 3, bias=False)

    def forward(self, x: Tensor, *, with_head: bool = True) -> Tensor:
        hidden = self.second(self.first(x).tanh()).tanh()
        return self.head(hidden) if with_head else hidden


def pair(reshard_after_forward: bool | None = False) -> Rows:
    def shard(model: Any) -> Any:
        for unit in (model.first, model.second, model):
            fully_shard(unit, reshard_after_forward=reshard_after_forward)
        return model

    return Rows(Model, shard, vectors)


def batch() -> Tensor:
    return torch.ones(4, DIM, dtype=torch.float64)


def are_plain(module: nn.Module) -> set[bool]:
    return {not isinstance(param, DTensor) for param in module.parameters()}


@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@distributed(world_size=2)
def test_what_is_kept_is_whole(reshard_after_forward: bool | None) -> None:
    both = pair(reshard_after_forward)
    for _ in range(2):
        losses = both.forward()
        assert are_plain(both.model.first) == {reshard_after_forward is False}
        assert are_plain(both.model.head) == {reshard_after_forward is not True}
        if reshard_after_forward is False:
            for own, other in zip(
                both.model.parameters(), both.reference.parameters(), strict=True
            ):
                assert torch.equal(own, other)
        for loss in losses:
            loss.backward()
        both.check()


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(batch())


USES: dict[str, Callable[[Any], object]] = {
    "reshard": lambda model: model.reshard(),
    "state_dict": lambda model: model.state_dict(),
    "load": lambda model: model.load_state_dict(model.state_dict()),
    "forward": lambda model: model(batch()),
    "eval": evaluate,
    "unshard": lambda model: model.unshard(),
}


@pytest.mark.parametrize("use", list(USES))
@distributed(world_size=2)
def test_backward_after(use: str) -> None:
    """What the user does in between changes no gradient."""
    both = pair()
    both.train(1, inside=lambda: USES[use](both.model))
    both.train(1)


@distributed(world_size=2)
def test_state_dicts_are_sharded() -> None:
    """Also of what the user unsharded."""
    model = pair().model
    keys = set(model.state_dict())
    model(batch())
    state = model.state_dict()
    assert set(state) == keys
    assert all(isinstance(value, DTensor) for value in state.values())
    model.unshard()
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


@distributed(world_size=2)
def test_optimizer_state_in_between() -> None:
    """By names, which torch finds by the registered parameters."""
    both = pair()
    both.train(1)

    def save_and_load() -> None:
        state = get_optimizer_state_dict(both.model, both.optimizer)
        assert set(state["state"]) == set(both.model.state_dict())
        set_optimizer_state_dict(both.model, both.optimizer, state)

    both.train(1, inside=save_and_load)


@distributed(world_size=2)
def test_conversion_in_between() -> None:
    """Of several modules that keep their whole parameters."""
    both = pair()
    both.forward()
    both.model.to(TEST_DEVICE)
    assert are_plain(both.model) == {False}
    both.train(1)


@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(world_size=2)
def test_zero_grad_in_between(set_to_none: bool) -> None:
    both = pair()

    def clear() -> None:
        for model in (both.reference, both.model):
            model.zero_grad(set_to_none=set_to_none)

    both.forward_backward()
    both.forward_backward(inside=clear)
    both.check()


@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(world_size=2)
def test_zero_grad_of_one_module_of_a_group(set_to_none: bool) -> None:
    """Those of the other modules stay."""

    def shard(model: Any) -> Any:
        fully_shard([model.first, model.second], reshard_after_forward=False)
        return fully_shard(model)

    both = Rows(Model, shard, vectors)

    def clear() -> None:
        for model in (both.reference, both.model):
            model.second.zero_grad(set_to_none=set_to_none)

    both.forward_backward()
    both.forward_backward(inside=clear)
    both.check()


@distributed(world_size=2)
def test_a_loss_with_the_heads_weight() -> None:
    """Fused losses take the weight of the head, outside of all forwards."""

    def loss(model: Any, x: Tensor) -> Tensor:
        hidden = model(x, with_head=False)
        return functional.linear(hidden, model.head.weight).square().sum()

    pair(None).train_on(loss, 2)


@distributed(world_size=2)
def test_a_parameter_that_is_replaced_in_between() -> None:
    """The next forward takes it over."""
    both = pair()
    model = both.model
    model(batch())
    for unit in (model, model.first, model.second):
        unit.reshard()
    new = nn.Parameter(model.head.weight.detach() * 2)
    model.head.weight = both.sharded["head.weight"] = new
    with torch.no_grad():
        both.reference.get_parameter("head.weight").mul_(2)
    both.forward_backward()
    both.check()


class Spare(nn.Module):
    """A unit that forward leaves out: losses use its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.spare = nn.Linear(DIM, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out


def shard_spare(model: Any) -> Any:
    for unit in (model.first, model.spare, model):
        fully_shard(unit)
    return model


@distributed(world_size=2)
def test_what_the_user_unsharded() -> None:
    """Registered whole in forwards of others, until a backward ends, as in torch."""
    both = Rows(Spare, shard_spare, vectors)
    evaluate(both.model)  # the root makes another engine, which begins sharded

    def loss(model: Any, x: Tensor, *, uses: bool) -> Tensor:
        if model is both.model:
            model.spare.unshard()
        evaluate(model)
        hidden = model(x)
        assert are_plain(model.spare) == {True}
        if uses:
            hidden = functional.linear(hidden, model.spare.weight)
        return hidden.square().sum()

    for uses in (False, True, True):
        both.backward_of(functools.partial(loss, uses=uses))
        both.check()


class Beside(nn.Module):
    """Two modules of one call, of which forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(DIM, DIM)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x).tanh()
        return out


@pytest.mark.parametrize("reshards", [True, False])
@distributed(world_size=2)
def test_a_list_of_which_a_module_does_not_run(reshards: bool) -> None:
    """It is resharded when the root's forward ends, if at all, as in torch."""

    def shard(model: Any) -> Any:
        for each in model:
            fully_shard([each.used, each.spare], reshard_after_forward=reshards)
        return fully_shard(model)

    both = Rows(lambda: nn.Sequential(Beside(), Beside()), shard, vectors)
    model = both.model
    for _ in range(2):
        losses = both.forward()
        assert are_plain(model[0].used) == are_plain(model[1].spare) == {not reshards}
        for loss in losses:
            loss.backward()
        both.check()
    evaluate(model)
    assert are_plain(model) == {False}
