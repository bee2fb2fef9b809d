"""``torch.autograd.grad`` for inputs: in a forward (energies and forces), or behind it.

That backward ends before the one of the loss: in the middle of a forward, which goes on
with whole parameters, or between both, for a gradient penalty. Against the unsharded
model.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_c import fully_shard, optimizer_in_backward, reset
from helpers.distributed import distributed
from helpers.impl import fsdp
from helpers.models import Inputs
from helpers.reference import Differential, sgd
from helpers.rows import APIS, in_either_api

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
    """The root's ``out`` is used between its parts, which are units."""
    if api == "fully_shard":
        for part in (model.energy, model.again, model):
            fully_shard(part)
        return model
    for name in ("energy", "again"):
        part = getattr(model, name)
        setattr(model, name, fsdp(part, strategy=api, use_orig_params=True))
    return fsdp(model, strategy=api, use_orig_params=True)


def _batch(generator: torch.Generator) -> Inputs:
    return (torch.randn(3, DIM, generator=generator),)


@pytest.mark.parametrize("api", ["FULL_SHARD", "SHARD_GRAD_OP", "fully_shard"])
@pytest.mark.parametrize("is_wanted_of_output", [False, True])
@distributed(world_size=(2, 3))
def test_forward_goes_on(api: str, is_wanted_of_output: bool) -> None:
    """Two steps, and a forward without gradients between them."""
    both = in_either_api(
        "fully_shard" if api == "fully_shard" else "FSDP",
        lambda: Forces(is_wanted_of_output),
        (),
        _batch,
        shard=lambda model: _shard(model, api),
    )
    for _ in range(2):
        both.train(1)
        both.evaluate()


class Part(nn.Linear):
    """A layer, maybe a unit."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)


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
    both: Differential,
    loss: Callable[[nn.Module, Tensor], Tensor],
    steps_in_backward: bool,
) -> None:
    """Train on two micro-batches a step; the first one's gradients are kept."""
    if steps_in_backward:
        optimizer_in_backward(both.model, sgd)
    for _ in range(2):
        both.zero_grad()
        with both.no_sync():
            both.backward_of(_mean_square)
        both.backward_of(loss)
        if steps_in_backward:
            both.reference_optimizer.step()
            both.reference.zero_grad()
            both.check()
        else:
            both.checked_step()


@pytest.mark.parametrize("steps_in_backward", [False, True])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@distributed(world_size=2)
def test_gradients_kept_by_no_sync(
    strategy: str, use_orig_params: bool, steps_in_backward: bool
) -> None:
    """The inner backward leaves them to the one that the forward waits for."""
    both = in_either_api(
        "FSDP" if use_orig_params else "FSDP flat",
        lambda: nn.Sequential(Part(), Energy(), Part()),
        {Part, Energy},
        _batch,
        strategy=strategy,
    )
    _check_no_sync(both, _mean_square, steps_in_backward)


@pytest.mark.parametrize("steps_in_backward", [False, True])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_gradient_penalty_after_no_sync(
    use_orig_params: bool, steps_in_backward: bool
) -> None:
    """The call for the input's gradient leaves them to the backward of the loss."""
    both = in_either_api(
        "FSDP" if use_orig_params else "FSDP flat",
        lambda: nn.Sequential(Part(), nn.Tanh(), Part()),
        (),
        _batch,
        strategy="NO_SHARD",
    )
    _check_no_sync(both, _penalty, steps_in_backward)


class Scaled(nn.Module):
    """A parameter of two elements, of which a rank's shard broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale)


@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_saved_parameters_of_a_sharded_unit(api: str) -> None:
    """Reading them is an error on all ranks; the shard in their place would be wrong.

    A model that has met it trains on.
    """

    def build() -> nn.Module:
        return nn.Sequential(Scaled(), nn.Linear(2, 2))

    def make_batch(generator: torch.Generator) -> Inputs:
        return (torch.randn(4, 2, generator=generator),)

    both = in_either_api(api, build, {Scaled}, make_batch)
    x = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(both.model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad.square().mean().backward()
    reset(both.model)
    both.zero_grad()
    both.train(2)
