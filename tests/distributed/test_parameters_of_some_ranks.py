"""Ranks that use different parameters of a unit, others in each step, train correctly.

A rank that uses all parameters of a unit has their gradients earlier than one that does
not. Both must issue the unit's reduction at the same place.
"""

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import distributed, every_strategy
from helpers.models import DIM, vectors
from helpers.reference import Differential, Inputs
from helpers.rows import Rows, shard_units
from helpers.seeds import seeded
from helpers.transports import OWN, over

NUM_BLOCKS = 4
NUM_STEPS = 6


class Pair(nn.Module):
    """A layer, what lies inside, and a layer that some calls leave out."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.inner = inner
        self.second = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, uses: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.inner is not None:
            x = self.inner(x, uses[1:])
        return torch.tanh(self.second(x)) if uses[0] else x


class Optional(nn.Module):
    """Blocks in a row, of which one has another inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair(), Pair(Pair()), Pair()])
        self.out = nn.Linear(DIM, 3)

    def forward(self, x: Tensor, uses: Tensor) -> Tensor:
        x = self.blocks[0](x, uses)
        x = self.blocks[1](x, uses[1:])
        x = self.blocks[2](x, uses[3:])
        return self.out(x)


class SomeRanks(Differential):
    """Adds to each rank's batch which blocks it uses; each is used by some rank."""

    def batches(self) -> list[Inputs]:
        """Return the next batch of every rank."""
        batches = super().batches()
        generator = seeded(self.num_batches)
        uses = torch.randint(2, (len(batches), NUM_BLOCKS), generator=generator)
        unused = uses.sum(0) == 0
        lucky = torch.randint(len(batches), (NUM_BLOCKS,), generator=generator)
        uses[lucky[unused], unused.nonzero().flatten()] = 1
        return [
            (x.double(), mine)
            for (x,), mine in zip(batches, uses.unbind(), strict=True)
        ]


class SomeRanksRows(SomeRanks, Rows):
    """The same under ``fully_shard``."""


def _build() -> nn.Module:
    return Optional().double()


@pytest.mark.each_value
@every_strategy
@pytest.mark.parametrize("transport", [OWN, "c10d"])
@distributed(world_size=(2, 3))
def test_training(strategy: str, transport: str, use_orig_params: bool) -> None:
    """Gradients and parameters are the unsharded model's after every step."""
    with over(transport):
        differential = SomeRanks.of_units(
            _build, {Pair}, strategy=strategy, use_orig_params=use_orig_params
        )
        differential.train(NUM_STEPS)
        differential.run("znsu")
        del differential


@pytest.mark.each_value
@pytest.mark.parametrize("transport", [OWN, "c10d"])
@pytest.mark.parametrize("reshards", [True, False])
@distributed(world_size=(2, 3))
def test_fully_shard(transport: str, reshards: bool) -> None:
    """DTensors have the same gradients."""
    with over(transport):
        differential = SomeRanksRows(
            _build,
            lambda model: shard_units(model, {Pair}, reshard_after_forward=reshards),
            vectors,
        )
        differential.train(NUM_STEPS)
        del differential
