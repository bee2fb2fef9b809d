"""``torch.autograd.grad`` for inputs: in a forward (energies and forces), or behind it.

That backward ends before the one of the loss: in the middle of a forward, which goes on
with whole parameters, or between both, for a gradient penalty. Against the unsharded
model.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_c import fully_shard, optimizer_in_backward
from helpers.distributed import distributed
from helpers.impl import FSDP, fsdp
from helpers.reference import sgd

DIM = 4


class Forces(nn.Module):
    """Takes a gradient through a unit, and uses its own parameters after that."""

    def __init__(self, is_wanted_of_output: bool) -> None:
        super().__init__()
        self.energy = nn.Linear(DIM, DIM)
        self.again = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.linspace(1.0, 2.0, DIM))
        self.is_wanted_of_output = is_wanted_of_output

    def forward(self, x: Tensor) -> Tensor:
        """Return what the forces and the second use of ``again`` make of ``x``."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            hidden = torch.tanh(self.again(self.energy(x)))
            wanted = x
            if self.is_wanted_of_output:
                wanted = self.energy(x)
                hidden = torch.tanh(self.again(wanted))
            (forces,) = torch.autograd.grad(
                hidden.square().sum(), wanted, retain_graph=True
            )
        result: Tensor = self.again(self.out(hidden + forces) * self.scale)
        return result


def _shard(model: Forces, api: str) -> Any:
    if api == "fully_shard":
        for part in (model.energy, model.again, model):
            fully_shard(part)
        return model
    for name in ("energy", "again"):
        part = getattr(model, name)
        setattr(model, name, fsdp(part, strategy=api, use_orig_params=True))
    return fsdp(model, strategy=api, use_orig_params=True)


def _grads(model: Any, api: str) -> list[Tensor]:
    if api == "fully_shard":
        return [param.grad.full_tensor() for param in model.parameters()]
    with FSDP.summon_full_params(model, with_grads=True):
        return [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize("api", ["FULL_SHARD", "SHARD_GRAD_OP", "fully_shard"])
@pytest.mark.parametrize("is_wanted_of_output", [False, True])
@distributed(world_size=(2, 3))
def test_forward_goes_on(api: str, is_wanted_of_output: bool) -> None:
    """Two steps, and a forward without gradients between them."""
    expected = Forces(is_wanted_of_output)
    model = _shard(copy.deepcopy(expected), api)
    x = torch.randn(3, DIM)  # on all ranks, so the mean is each rank's
    for _ in range(2):
        for each in (expected, model):
            each.zero_grad()
            each(x).square().mean().backward()
        grads = _grads(model, api)
        for param, grad in zip(expected.parameters(), grads, strict=True):
            torch.testing.assert_close(grad, param.grad)
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected(x))


class Energy(nn.Module):
    """Takes a gradient of its input, which backward differentiates again."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` after a step down the energy."""
        energy = self.out(torch.tanh(self.hidden(x))).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.3 * force


def _mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def _penalty(model: nn.Module, batch: Tensor) -> Tensor:
    """Return a loss with the squared gradient of the input."""
    x = batch.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss: Tensor = out.square().mean() + grad.square().mean()
    return loss


def _check_no_sync(
    model: Any,
    expected: nn.Module,
    loss: Callable[[nn.Module, Tensor], Tensor],
    steps_in_backward: bool,
) -> None:
    """Train on two micro-batches a step; the first one's gradients are kept."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference = sgd(expected.parameters())
    if steps_in_backward:
        optimizer_in_backward(model, sgd)
    else:
        optimizer = sgd(model.parameters())
    for _ in range(2):
        batches = torch.randn(2, world_size, 3, DIM)
        for first, second in zip(*batches, strict=True):
            (_mean_square(expected, first) / world_size).backward()
            (loss(expected, second) / world_size).backward()
        with model.no_sync():
            _mean_square(model, batches[0, rank]).backward()
        loss(model, batches[1, rank]).backward()
        if not steps_in_backward:
            optimizer.step()
            optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
        with FSDP.summon_full_params(model):
            for mine, param in zip(
                model.module.parameters(), expected.parameters(), strict=True
            ):
                torch.testing.assert_close(mine, param)


@pytest.mark.parametrize("steps_in_backward", [False, True])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@distributed(world_size=2)
def test_gradients_kept_by_no_sync(
    strategy: str, use_orig_params: bool, steps_in_backward: bool
) -> None:
    """The inner backward leaves them to the one that the forward waits for."""
    expected = nn.Sequential(nn.Linear(DIM, DIM), Energy(), nn.Linear(DIM, DIM))
    model = copy.deepcopy(expected)
    for index, part in enumerate(model):
        model[index] = fsdp(part, strategy=strategy, use_orig_params=use_orig_params)
    model = fsdp(model, strategy=strategy, use_orig_params=use_orig_params)
    _check_no_sync(model, expected, _mean_square, steps_in_backward)


@pytest.mark.parametrize("steps_in_backward", [False, True])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_gradient_penalty_after_no_sync(
    use_orig_params: bool, steps_in_backward: bool
) -> None:
    """The call for the input's gradient leaves them to the backward of the loss."""
    expected = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
    model = fsdp(
        copy.deepcopy(expected), strategy="NO_SHARD", use_orig_params=use_orig_params
    )
    _check_no_sync(model, expected, _penalty, steps_in_backward)
