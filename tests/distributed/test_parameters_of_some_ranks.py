"""Ranks that use different parameters of a unit, others in each step, train correctly.

A rank that uses all parameters of a unit has their gradients earlier than one that does
not. Both must issue the unit's reduction at the same place.
"""

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import STRATEGIES, distributed
from helpers.models import DIM
from helpers.reference import Differential, Inputs
from helpers.rows import Rows, in_either_api
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
        batches = super().batches()
        generator = seeded(self.num_batches)
        uses = torch.randint(2, (len(batches), NUM_BLOCKS), generator=generator)
        unused = uses.sum(0) == 0
        lucky = torch.randint(len(batches), (NUM_BLOCKS,), generator=generator)
        uses[lucky[unused], unused.nonzero().flatten()] = 1
        return [(x, mine) for (x,), mine in zip(batches, uses.unbind(), strict=True)]


class SomeRanksRows(SomeRanks, Rows):
    """The same under ``fully_shard``."""


@pytest.mark.parametrize("transport", [OWN, "c10d"])
@pytest.mark.parametrize("api", ["FSDP", "FSDP flat", "fully_shard"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=(2, 3))
def test_training(strategy: str, api: str, transport: str) -> None:
    """Gradients and parameters are the unsharded model's after every step."""
    with over(transport):
        differential = in_either_api(
            api, Optional, {Pair}, strategy=strategy, kinds=(SomeRanks, SomeRanksRows)
        )
        differential.train(NUM_STEPS)
        if api != "fully_shard":
            differential.run("znsu")
        del differential
