"""The plan of a tensor parallel model: a factory makes its parameters DTensors."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp_c.tools.plan import (
    ModelPlan,
    ModelSource,
    PlanError,
    Settings,
    Sharding,
    plan_model,
)
from fsdp_c.tools.plan._trace import Inputs
from helpers.fake_ranks import fake_ranks

TENSOR_PARALLEL, NUM_SHARDS = 2, 4
WIDTH, HIDDEN, TOKENS, NUM_BLOCKS = 64, 256, 32, 3


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    """The ranks that share a matrix."""
    with fake_ranks(TENSOR_PARALLEL):
        yield


class Block(nn.Module):
    """Two matrices, which ranks share, and a norm, which all have."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


class Net(nn.Sequential):
    """Blocks, and a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def planned(hidden: int, *, shares: bool, optimizer: str = "adamw") -> ModelPlan:
    def make(_batch: int, _sequence: int) -> tuple[nn.Module, Inputs]:
        model = Net(*(Block(hidden) for _ in range(NUM_BLOCKS)))
        if shares:
            mesh = init_device_mesh("cpu", (TENSOR_PARALLEL,))
            styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in model:
                parallelize_module(block, mesh, styles)
        return model, Inputs((torch.empty(TOKENS, WIDTH),))

    return plan_model(
        ModelSource("net", make),
        [NUM_SHARDS],
        sharding=Sharding(param_dtype=torch.bfloat16, fully_shard=True),
        settings=Settings(optimizer=optimizer),
        wrap="Block",
    )


def test_a_rank_has_its_share_of_each_matrix() -> None:
    """As a model with half as many hidden features, whose outputs are sums of two."""
    shared, half = planned(HIDDEN, shares=True), planned(HIDDEN // 2, shares=False)
    assert not any("not known" in note for note in shared.notes)
    (of_shared,), (of_half,) = shared.ranks, half.ranks
    assert of_shared.shard_nbytes == of_half.shard_nbytes
    assert of_shared.optimizer_nbytes == of_half.optimizer_nbytes
    assert of_shared.all_gather == of_half.all_gather
    assert of_shared.reduce_scatter == of_half.reduce_scatter
    assert shared.flops == half.flops
    # The ranks' sum is a tensor of its own.
    sums = NUM_BLOCKS * TOKENS * WIDTH * torch.bfloat16.itemsize
    assert 0 <= of_shared.peak_nbytes - of_half.peak_nbytes <= sums


def test_owners_of_shared_matrices_are_not_planned() -> None:
    with pytest.raises(PlanError, match=r"muon: '0\.up\.weight' is a DTensor"):
        planned(HIDDEN, shares=True, optimizer="muon")
