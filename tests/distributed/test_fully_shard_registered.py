"""fully_shard: which parameters are registered between forward and backward.

torch documents it: what is not resharded after forward is there whole until backward,
or until reshard().
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from fsdp_c import fully_shard
from helpers.distributed import TEST_DEVICE, distributed


class Model(nn.Module):
    """Two units and a head, which the root has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor, *, with_head: bool = True) -> Tensor:
        hidden = self.second(self.first(x).tanh()).tanh()
        return self.head(hidden) if with_head else hidden


def both(reshard_after_forward: bool | int | None) -> tuple[Model, Any]:
    torch.manual_seed(3)
    reference = Model().double().to(TEST_DEVICE)
    model = copy.deepcopy(reference)
    mesh = init_device_mesh(TEST_DEVICE, (2,))
    for unit in (model.first, model.second, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return reference, model


def batch() -> Tensor:
    """Return the same on all ranks, so the mean of gradients is one of them."""
    return torch.linspace(-1, 1, 24).double().view(4, 6).to(TEST_DEVICE)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check(reference: nn.Module, model: nn.Module) -> None:
    for (name, own), other in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        assert isinstance(own, DTensor), name
        torch.testing.assert_close(whole(own), other.detach(), rtol=0, atol=1e-12)
        if other.grad is None:
            assert own.grad is None, name
        else:
            assert own.grad is not None, name
            torch.testing.assert_close(whole(own.grad), other.grad, rtol=0, atol=1e-12)


def are_plain(module: nn.Module) -> set[bool]:
    return {not isinstance(param, DTensor) for param in module.parameters()}


@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@distributed(world_size=2)
def test_what_is_kept_is_whole(reshard_after_forward: bool | None) -> None:
    reference, model = both(reshard_after_forward)
    sharded = list(model.parameters())
    for _ in range(2):
        out = model(batch())
        assert are_plain(model.first) == {reshard_after_forward is False}
        assert are_plain(model.head) == {reshard_after_forward is not True}
        if reshard_after_forward is False:
            for own, other in zip(
                model.parameters(), reference.parameters(), strict=True
            ):
                assert torch.equal(own, other)
        out.sum().backward()
        assert are_plain(model) == {False}
        assert all(a is b for a, b in zip(model.parameters(), sharded, strict=True))
        reference(batch()).sum().backward()
        check(reference, model)


def optimizer_step(model: nn.Module) -> None:
    for param in model.parameters():
        assert isinstance(param, DTensor)
        with torch.no_grad():
            param.mul_(0.5)


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
    reference, model = both(False)
    out = model(batch())
    USES[use](model)
    out.sum().backward()
    reference(batch()).sum().backward()
    check(reference, model)
    model.zero_grad()
    reference.zero_grad()
    optimizer_step(model)
    with torch.no_grad():
        for param in reference.parameters():
            param.mul_(0.5)
    model(batch()).sum().backward()
    reference(batch()).sum().backward()
    check(reference, model)


@distributed(world_size=2)
def test_state_dicts_are_sharded() -> None:
    """Also of what the user unsharded."""
    _, model = both(False)
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
    reference, model = both(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model(batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    out = model(batch())
    state = get_optimizer_state_dict(model, optimizer)
    assert set(state["state"]) == set(model.state_dict())
    set_optimizer_state_dict(model, optimizer, state)
    out.sum().backward()
    reference(batch()).sum().backward()
    check(reference, model)


@distributed(world_size=2)
def test_conversion_in_between() -> None:
    """Of several modules that keep their whole parameters."""
    reference, model = both(False)
    model(batch())
    model.to(TEST_DEVICE)
    assert are_plain(model) == {False}
    model(batch()).sum().backward()
    reference(batch()).sum().backward()
    check(reference, model)


@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(world_size=2)
def test_zero_grad_in_between(set_to_none: bool) -> None:
    reference, model = both(False)
    for each in (reference, model):
        each(batch()).sum().backward()
        out = each(batch())
        each.zero_grad(set_to_none=set_to_none)
        out.square().sum().backward()
    check(reference, model)


@distributed(world_size=2)
def test_a_loss_with_the_heads_weight() -> None:
    """Fused losses take the weight of the head, outside of all forwards."""
    reference, model = both(None)
    for _ in range(2):
        for each in (reference, model):
            hidden = each(batch(), with_head=False)
            functional.linear(hidden, each.head.weight).square().sum().backward()
        check(reference, model)


@distributed(world_size=2)
def test_a_parameter_that_is_replaced_in_between() -> None:
    """The next forward takes it over."""
    reference, model = both(False)
    model(batch())
    model.reshard()
    for unit in (model.first, model.second):
        unit.reshard()
    new = nn.Parameter(model.head.weight.detach() * 2)
    model.head.weight = new
    with torch.no_grad():
        reference.head.weight.mul_(2)
    model(batch()).sum().backward()
    reference(batch()).sum().backward()
    check(reference, model)
    assert model.head.weight is new


class Spare(nn.Module):
    """A unit that forward leaves out: losses use its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.spare = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out


@distributed(world_size=2)
def test_what_the_user_unsharded() -> None:
    """Registered whole in forwards of others, until a backward ends, as in torch."""
    reference = Spare().double().to(TEST_DEVICE)
    model: Any = copy.deepcopy(reference)
    for unit in (model.first, model.spare, model):
        fully_shard(unit)
    model(batch())  # the root makes another engine, which begins sharded
    for uses in (False, True, True):
        model.spare.unshard()
        with torch.no_grad():
            model(batch())
        hidden = model(batch())
        assert are_plain(model.spare) == {True}
        expected = reference(batch())
        if uses:
            hidden = functional.linear(hidden, model.spare.weight)
            expected = functional.linear(expected, reference.spare.weight)
        hidden.square().sum().backward()
        expected.square().sum().backward()
        assert are_plain(model.spare) == {False}
        check(reference, model)


class Beside(nn.Module):
    """Two modules of one call, of which forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 6)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x).tanh()
        return out


@pytest.mark.parametrize("reshards", [True, False])
@distributed(world_size=2)
def test_a_list_of_which_a_module_does_not_run(reshards: bool) -> None:
    """It is resharded when the root's forward ends, if at all, as in torch."""
    reference = nn.Sequential(Beside(), Beside()).double().to(TEST_DEVICE)
    model: Any = copy.deepcopy(reference)
    for each in model:
        fully_shard([each.used, each.spare], reshard_after_forward=reshards)
    fully_shard(model)
    for _ in range(2):
        loss = model(batch()).square().sum()
        assert are_plain(model[0].used) == are_plain(model[1].spare) == {not reshards}
        loss.backward()
        reference(batch()).square().sum().backward()
        check(reference, model)
    with torch.no_grad():
        model(batch())
    assert are_plain(model) == {False}
