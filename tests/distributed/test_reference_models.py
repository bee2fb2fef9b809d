"""Parameters that are frozen for some of the forwards of a step.

A reference model of DPO is the policy without its adapters, which peft freezes for
that forward. What a backward needs is decided by the forwards that it belongs to.
Compared with the unsharded model on the data of all ranks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.distributed import distributed
from helpers.models import DIM
from helpers.reference import Differential
from helpers.rows import APIS, in_either_api

Loss = Callable[[Any, Tensor], Tensor]


class _Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(DIM, 2, bias=False)
        self.up = nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class _Layer(nn.Module):
    """A frozen layer with two adapters, of which one is active, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.adapters = nn.ModuleList(_Adapter() for _ in range(2))
        self.active: int | None = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if self.active is not None:
            y = y + self.adapters[self.active](x)
        return torch.tanh(y)


class _Net(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(3))
        self.reentrant = reentrant
        """Of the checkpoints around layers; None: there are none."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()  # a reentrant checkpoint needs it
        for layer in self.layers:
            if self.reentrant is None or not torch.is_grad_enabled():
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def _with_adapters(
    api: str, strategy: str = "FULL_SHARD", reentrant: bool | None = None
) -> Differential:
    """Adapters are in the units of frozen weights, but for flat parameters."""
    units = {_Layer, _Adapter} if api == "FSDP flat" else {_Layer}
    return in_either_api(api, lambda: _Net(reentrant), units, strategy=strategy)


def _layers(model: nn.Module) -> list[_Layer]:
    return [module for module in model.modules() if isinstance(module, _Layer)]


def _without_adapters(model: nn.Module, x: Tensor) -> Tensor:
    """Do as peft's ``disable_adapter()``."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for layer in _layers(model):
        layer.active = None
    for param in trained:
        param.requires_grad_(False)
    with torch.no_grad():
        out: Tensor = model(x)
    for param in trained:
        param.requires_grad_(True)
    for layer in _layers(model):
        layer.active = 0
    return out


def _policy_first(model: nn.Module, x: Tensor) -> Tensor:
    policy = model(x)
    return (policy - _without_adapters(model, x) - 1).square().mean()


def _policy_last(model: nn.Module, x: Tensor) -> Tensor:
    reference = _without_adapters(model, x)
    return (model(x) - reference - 1).square().mean()


def _chosen_and_rejected(model: nn.Module, x: Tensor) -> Tensor:
    """Two forwards of each, in turn."""
    chosen, rejected = x, -2 * x
    ratios = []
    for each in (chosen, rejected):
        policy = model(each)
        ratios.append((policy - _without_adapters(model, each)).sum())
    return -nn.functional.logsigmoid(ratios[0] - ratios[1])


def _in_eval_mode(model: nn.Module, x: Tensor) -> Tensor:
    policy = model(x)
    model.eval()
    reference = _without_adapters(model, x)
    model.train()
    return (policy - reference - 1).square().mean()


LOSSES = {
    "policy first": _policy_first,
    "policy last": _policy_last,
    "chosen and rejected": _chosen_and_rejected,
    "in eval mode": _in_eval_mode,
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("loss", list(LOSSES))
@distributed(world_size=(1, 2))
def test_adapters_are_disabled(api: str, strategy: str, loss: str) -> None:
    """For a forward without gradients, between a forward and its backward."""
    _with_adapters(api, strategy).train_on(LOSSES[loss])


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("loss", ["policy first", "chosen and rejected"])
@distributed(world_size=2)
def test_adapters_are_disabled_with_checkpointing(
    api: str, reentrant: bool, loss: str
) -> None:
    """Backward runs the layers again."""
    _with_adapters(api, reentrant=reentrant).train_on(LOSSES[loss])


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("no_sync", [True, False])
@distributed(world_size=2)
def test_adapters_are_disabled_in_micro_batches(api: str, no_sync: bool) -> None:
    both = _with_adapters(api)
    for _ in range(2):
        both.zero_grad()
        for index in range(3):
            with both.no_sync(no_sync and index < 2):
                both.backward_of(_policy_first)
        both.checked_step()


# Adapters that are switched -----------------------------------------------------


def _trained(model: nn.Module, index: int) -> list[nn.Parameter]:
    """Return what the adapters of this number own, flat parameters too."""
    return [
        param
        for layer in _layers(model)
        for param in layer.adapters[index].parameters()
    ]


def _activate(model: nn.Module, index: int) -> None:
    """Do as peft's ``set_adapter()``: the other one is frozen."""
    for each in range(2):
        for param in _trained(model, each):
            param.requires_grad_(each == index)
    for layer in _layers(model):
        layer.active = index


def _switched_to_stay(model: nn.Module, x: Tensor) -> Tensor:
    """Both adapters' outputs in one loss.

    The first one is frozen when backward runs: autograd gives it nothing.
    """
    outs = []
    for index in range(2):
        _activate(model, index)
        outs.append(model(x))
    return (outs[0] - 0.5 * outs[1] - 1).square().mean()


def _switched(model: nn.Module, x: Tensor) -> Tensor:
    """The same, but all train when backward runs."""
    loss = _switched_to_stay(model, x)
    for param in _trained(model, 0):
        param.requires_grad_(True)
    return loss


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("loss", [_switched, _switched_to_stay])
@distributed(world_size=2)
def test_adapters_are_switched(api: str, loss: Loss) -> None:
    """Within a step."""
    _with_adapters(api).train_on(loss)


# Whole units that are frozen for a forward --------------------------------------


class _Part(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))


class _Pair(nn.Module):
    """A generator and a discriminator, or a student and a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Part(), _Part()

    def forward(self, x: Tensor, *, of_data: bool = False) -> Tensor:
        return self.second(x if of_data else self.first(x))


def _freeze(model: nn.Module, part: str, frozen: bool) -> None:
    (found,) = (getattr(m, part) for m in model.modules() if isinstance(m, _Pair))
    for param in found.parameters():
        param.requires_grad_(not frozen)


def _generator_first(model: nn.Module, x: Tensor) -> Tensor:
    _freeze(model, "second", True)
    fooled = model(x)
    _freeze(model, "second", False)
    return fooled.mean() + model(x + 1, of_data=True).square().mean()


def _discriminator_first(model: nn.Module, x: Tensor) -> Tensor:
    real = model(x + 1, of_data=True)
    _freeze(model, "second", True)
    fooled = model(x)
    _freeze(model, "second", False)
    return fooled.mean() + real.square().mean()


def _teacher_between(model: nn.Module, x: Tensor) -> Tensor:
    student = model(x)
    _freeze(model, "first", True)
    with torch.no_grad():
        target = model(x + 1)
    again = model(2 * x)  # only the second part trains by it
    _freeze(model, "first", False)
    return (student - target).square().mean() + again.square().mean()


def _evaluated_between(model: nn.Module, x: Tensor) -> Tensor:
    """Evaluate the model with all of it frozen."""
    out = model(x)
    for part in ("first", "second"):
        _freeze(model, part, True)
    with torch.no_grad():
        scale = model(x + 1).abs().max()
    for part in ("first", "second"):
        _freeze(model, part, False)
    return (out / scale).square().mean()


FREEZES = {
    "generator first": _generator_first,
    "discriminator first": _discriminator_first,
    "teacher between": _teacher_between,
    "evaluated between": _evaluated_between,
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("loss", list(FREEZES))
@distributed(world_size=2)
def test_units_are_frozen_between_forwards(api: str, strategy: str, loss: str) -> None:
    both = in_either_api(api, _Pair, {_Part}, strategy=strategy)
    both.train_on(FREEZES[loss])
