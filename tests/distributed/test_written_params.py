"""Parameters that a module writes in its forward, where it has a copy of them.

The write goes with the copy; a warning names the parameter. Where the copy is the shard
itself, on a lone rank, nothing is lost and nothing is said.
"""

import warnings

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import distributed
from helpers.models import BATCH, DIM
from helpers.rows import APIS, shard_by


class _Normalizing(nn.Linear):
    """Its weight has norm 1 in each forward, as in EDM2."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm())
        return super().forward(x)


class _Functional(nn.Linear):
    """Computes with a function of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight / self.weight.norm(), self.bias)


class _Rewriting(nn.Linear):
    """Writes what its weight has, as registering a parametrization does."""

    num_alike = 100

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(self.weight * (1 if self.num_alike > 0 else 2))
        self.num_alike -= 1
        return super().forward(x)


class _Late(_Rewriting):
    """Writes other values in its second forward."""

    num_alike = 1


def _warnings_of(layer: type[nn.Linear], api: str) -> list[str]:
    model = nn.Sequential(nn.Linear(DIM, DIM), layer(DIM, DIM), layer(DIM, 2))
    sharded = shard_by(api, model, {layer})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            sharded(torch.randn(BATCH, DIM)).sum().backward()
    return [str(each.message) for each in caught if "during forward" in str(each)]


@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_a_write_that_is_dropped_is_named_once(api: str) -> None:
    (said,) = _warnings_of(_Normalizing, api)
    assert said.startswith(
        "FSDP unit '1': its parameter 'weight' was written during forward"
    )
    assert _warnings_of(_Functional, api) == []


@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_a_write_of_the_same_values_loses_nothing(api: str) -> None:
    assert _warnings_of(_Rewriting, api) == []
    assert len(_warnings_of(_Late, api)) == 1


@pytest.mark.parametrize("api", APIS)
@distributed(world_size=1)
def test_a_write_into_the_shard_stays(api: str) -> None:
    assert _warnings_of(_Normalizing, api) == []
