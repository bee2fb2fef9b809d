"""Ranks that run different units under the check of the order train on correctly.

Every rank runs its own path through the blocks; the reference runs every rank's batch
on that rank's path.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import STRATEGIES, distributed
from helpers.models import BATCH, DIM, MLP, Block
from helpers.orders import debugging
from helpers.reference import Differential, Inputs
from helpers.rows import APIS, Rows, in_either_api

NUM_BLOCKS = 4
COMMON = (0, 1, 2, 3)
# In each iteration, the path of each rank; ranks past the last one run that.
STEPS = [
    (COMMON,),
    ((0, 1), (0, 2)),
    ((0, 1), (0, 2)),
    (COMMON,),
    ((0, 1, 2, 3), (3, 2, 1, 0)),
    ((3, 0), (1,), (1, 2, 3)),
    ((), (0, 1, 2, 3)),
    ((2, 2, 1), (1, 2)),
    (COMMON,),
    ((0, 1, 2), (1, 2, 3), (0, 3)),
    (COMMON,),
]


class Paths(MLP):
    """Runs the blocks that an input names, in its order."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS)

    def forward(self, x: Tensor, path: Tensor) -> Tensor:
        x = self.inp(x)
        for index in path.tolist():
            x = self.blocks[index](x)
        return self.out(x)


class Diverging(Differential):
    """Adds each rank's path to its batch."""

    paths: tuple[tuple[int, ...], ...] = (COMMON,)

    def batches(self) -> list[Inputs]:
        last = len(self.paths) - 1
        return [
            (x.double(), torch.tensor(self.paths[min(rank, last)], dtype=torch.long))
            for rank, (x,) in enumerate(super().batches())
        ]


class DivergingRows(Diverging, Rows):
    """The same under ``fully_shard``."""


def _make(api: str, **options: Any) -> Diverging:
    made = in_either_api(
        api, Paths, {Block}, kinds=(Diverging, DivergingRows), **options
    )
    assert isinstance(made, Diverging)
    return made


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("prefetch", [True, False])
@distributed(world_size=(2, 3))
def test_training(strategy: str, api: str, prefetch: bool) -> None:
    """Gradients and parameters are the unsharded model's after every step."""
    options = {} if api == "fully_shard" else {"forward_prefetch": prefetch}
    with debugging("DETAIL"):
        differential = _make(api, strategy=strategy, **options)
        for differential.paths in STEPS:
            differential.train(1)
            differential.evaluate()
        del differential


@pytest.mark.parametrize("schedule", ["znsu", "znnsu", "zpsu", "zpnsu"])
@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=2)
def test_accumulation(strategy: str, api: str, schedule: str) -> None:
    """What no_sync kept on one rank only is reduced by all."""
    with debugging("INFO"):
        differential = _make(api, strategy=strategy)
        for differential.paths in STEPS[:6]:
            differential.run(schedule)
        differential.paths = (COMMON,)
        differential.train(1)
        del differential


def _failure(model: nn.Module, path: tuple[int, ...]) -> str:
    x = torch.ones(BATCH, DIM, dtype=torch.float64)
    with pytest.raises(RuntimeError) as caught:
        model(x, torch.tensor(path, dtype=torch.long)).sum().backward()
    return str(caught.value)


@distributed(world_size=2)
def test_no_sync_on_one_rank_is_refused(rank: int) -> None:
    """All ranks must do the same with a gradient."""
    with debugging("INFO"):
        differential = _make("FSDP")
        differential.train(1)
        model = differential.model
        if rank == 0:
            with model.no_sync():
                message = _failure(model, COMMON)
        else:
            message = _failure(model, COMMON)
        assert "all ranks must be in no_sync or none" in message
        del differential, model
