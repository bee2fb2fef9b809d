"""explain: a row per unit, with dtypes and sizes."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_c
from fsdp_c import MixedPrecisionPolicy
from helpers.distributed import distributed
from helpers.impl import MixedPrecision, fsdp
from helpers.models import DIM, MLP, Block
from helpers.rows import shard_units

pytestmark = pytest.mark.bookkeeping

explain: Any = fsdp_c.explain

BLOCK_NUMEL = 6 * 10 + 10 + 10 * 6 + 6
ROOT_NUMEL = (6 * 6 + 6) + (6 * 3 + 3)


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=(2, 3))
def test_mixed_precision(world_size: int, api: str) -> None:
    """Dtypes of every stage; sizes agree with the parameters, also on meta."""

    def make() -> Any:
        if api == "FSDP":
            precision = MixedPrecision(torch.bfloat16, torch.float32)
            return fsdp(
                MLP(2), units={Block}, mixed_precision=precision, use_orig_params=True
            )
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return shard_units(MLP(2), [Block], mp_policy=policy)

    model = make()
    plan = explain(model)
    assert [unit.name for unit in plan.units] == ["", "blocks.0", "blocks.1"]
    root = "FULL_SHARD" if api == "FSDP" else "SHARD_GRAD_OP"
    assert [u.strategy for u in plan.units] == [root, "FULL_SHARD", "FULL_SHARD"]
    for unit in plan.units:
        assert unit.world_size == world_size
        assert unit.master_dtypes == unit.reduce_dtypes == (torch.float32,)
        assert unit.compute_dtypes == (torch.bfloat16,)
        assert unit.buffer_dtypes == ()
        assert unit.frozen_share == 0.0
        padded_numel = unit.numel + unit.padding_numel
        assert unit.shard_nbytes * world_size == 4 * padded_numel
    assert [unit.numel for unit in plan.units] == [ROOT_NUMEL, BLOCK_NUMEL, BLOCK_NUMEL]
    assert plan.numel == ROOT_NUMEL + 2 * BLOCK_NUMEL
    assert plan.padding_numel == sum(unit.padding_numel for unit in plan.units)
    if api == "fully_shard":
        shapes = [param.shape for param in model.parameters()]
        rows = [-(-shape[0] // world_size) * world_size for shape in shapes]
        padded = [n * math.prod(s[1:]) for n, s in zip(rows, shapes, strict=True)]
        assert plan.numel + plan.padding_numel == sum(padded)
    model(torch.ones(4, DIM)).sum().backward()
    assert explain(model) == plan
    assert fsdp_c.memory_stats(model)["shard_nbytes"] == plan.shard_nbytes
    assert fsdp_c.memory_stats(model)["num_units"] == 3
    if api == "fully_shard":
        with torch.device("meta"):
            assert explain(make()) == plan


@distributed(world_size=2)
def test_frozen_mixed_and_buffers() -> None:
    """Several segments in one unit; a unit that trains nothing."""
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[0].weight.requires_grad_(False)
    net[0].bias.data = net[0].bias.data.double()
    net[2].requires_grad_(False)
    net[2] = fsdp(net[2], strategy="NO_SHARD")
    model = fsdp(net, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    root, frozen = explain(model).units
    assert root.master_dtypes == (torch.float32, torch.float64)
    assert root.reduce_dtypes == (torch.float64, torch.float32)
    assert root.buffer_dtypes == (torch.bfloat16,)
    assert (root.numel, root.frozen_numel) == (12 + 3 + 6, 12)
    assert root.frozen_share == pytest.approx(12 / 21)
    assert frozen.strategy == "NO_SHARD"
    assert frozen.world_size == 1
    assert frozen.reduce_dtypes == ()
    assert frozen.frozen_share == 1.0
    assert frozen.shard_nbytes >= 4 * 8


@distributed(world_size=2)
def test_table_and_rows() -> None:
    """The table has a line per unit and a total; rows are plain data."""
    plan = explain(fsdp(MLP(1), units={Block}))
    lines = str(plan).splitlines()
    assert [line.split()[0] for line in lines] == [
        "unit",
        "(root)",
        "blocks.0",
        "total",
    ]
    assert lines[2].split()[1:6] == ["FULL_SHARD", "2", "float32", "float32", "float32"]
    assert lines[3].split()[1] == f"{ROOT_NUMEL + BLOCK_NUMEL}"
    row = plan.rows()[1]
    assert row["name"] == "blocks.0"
    assert row["master_dtypes"] == ["float32"]
    assert row["numel"] == BLOCK_NUMEL


@distributed(world_size=2)
def test_without_parameters() -> None:
    """A unit may be empty."""
    (unit,) = explain(fsdp(nn.ReLU())).units
    assert (unit.numel, unit.shard_nbytes, unit.frozen_share) == (0, 0, 0.0)
