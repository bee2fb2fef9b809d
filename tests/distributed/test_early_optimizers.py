"""Optimizers and modules that keep parameters from before the model was sharded."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_c import whole_parameter_optimizer
from helpers.distributed import distributed
from helpers.models import BATCH, DIM
from helpers.rows import APIS, shard_by

SAID = "steps 4 of 4 parameters, the first of them '0.weight', that are no longer"


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 2))


def _warnings_of(model: Any, optimizer: torch.optim.Optimizer) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(BATCH, DIM)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [str(each.message) for each in caught]
    return [each for each in said if "no longer the model's" in each]


@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_one_that_trains_nothing_is_named_once(api: str) -> None:
    """Where sharding replaces parameters; with use_orig_params it keeps them."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = shard_by(api, model, {})
    said = _warnings_of(sharded, optimizer)
    assert len(said) == (0 if api == "FSDP" else 1)
    assert all(f"SGD {SAID}" in each for each in said)
    assert not _warnings_of(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))


@pytest.mark.parametrize("unshards", [True, False])
@distributed(world_size=2)
def test_one_of_whole_parameters(unshards: bool) -> None:
    """They are registered after unshard(), and by a root between its two passes."""
    model = shard_by("fully_shard", _model(), {})
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    if unshards:
        model.unshard()
    else:
        model(torch.randn(BATCH, DIM))
    optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
    model.reshard()
    sharded, whole = (_warnings_of(model, optimizer) for optimizer in optimizers)
    assert not sharded
    assert len(whole) == 1
    assert f"SGD {SAID}" in whole[0]


@distributed(world_size=2)
def test_one_that_follows_the_model() -> None:
    model = _model()
    optimizer = whole_parameter_optimizer(model, torch.optim.SGD)
    assert not _warnings_of(shard_by("fully_shard", model, {}), optimizer)


class _WithList(nn.Module):
    """Keeps its parameters in a list that no module knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.__dict__["weights"] = [self.layer.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = nn.functional.linear(x, weight, self.layer.bias)
        return x


@distributed(world_size=2)
def test_one_that_is_computed_with() -> None:
    model = shard_by("fully_shard", nn.Sequential(_WithList(), nn.Linear(DIM, 2)), {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(BATCH, DIM)).sum().backward()
    said = [str(each.message) for each in caught]
    said = [each for each in said if "a gradient came to the old parameter" in each]
    assert len(said) == 1
    assert "'0.layer.weight', which fully_shard() replaced" in said[0]
