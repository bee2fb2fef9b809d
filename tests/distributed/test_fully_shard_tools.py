"""explain, trace and the other API's functions, of what fully_shard() sharded."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import fsdp_c
from fsdp_c import trace
from fsdp_c._engines.engine import engine_listeners
from fsdp_c.tools.trace import _automatic
from fsdp_c.tools.trace._lanes import lanes_of
from helpers.distributed import distributed
from helpers.groups import kept_mesh
from helpers.models import DIM, MLP, Block
from helpers.rows import shard_units

pytestmark = pytest.mark.bookkeeping

explain: Any = fsdp_c.explain


def _sharded(model: nn.Module, **options: Any) -> Any:
    return shard_units(model, [Block], **options)


def _step(model: Any) -> None:
    model(torch.ones(4, DIM)).sum().backward()
    model.zero_grad()


@distributed(world_size=4)
def test_replicas() -> None:
    mesh = kept_mesh((2, 2), ("replicate", "shard"))
    model = _sharded(MLP(1), mesh=mesh, reshard_after_forward=False)
    for unit in explain(model).units:
        assert unit.strategy == "_HYBRID_SHARD_ZERO2"
        assert unit.world_size == 2


@distributed(world_size=2)
def test_trace(rank: int, tmp_path: Path) -> None:
    model = _sharded(MLP(2))
    _step(model)
    with trace.record(model, steps=2, folder=tmp_path) as timeline:
        _step(model)
        _step(model)
    units = timeline.recorded.units
    assert [unit.name for unit in units] == ["", "blocks.0", "blocks.1"]
    assert [unit.num_params for unit in units] == [4, 4, 4]
    assert {unit.shard_ranks for unit in units} == {(0, 1)}
    kinds = {span.kind for span in timeline.recorded.spans}
    assert {"pre_forward", "grad_ready", "all_gather", "reduce_scatter"} <= kinds
    assert "blocks.1" in str(timeline.summary())
    assert (tmp_path / f"rank{rank}.json").exists()
    with pytest.raises(ValueError, match="pass the outermost sharded module"):
        trace.start(model.blocks[0])


@pytest.mark.parametrize("api", ["fsdp", "fully_shard"])
@distributed(world_size=2)
def test_trace_of_a_script_that_cannot_be_changed(
    rank: int, tmp_path: Path, api: str
) -> None:
    """FSDP_C_TRACE=folder: the third, fourth and fifth step of the root."""
    _automatic.install(str(tmp_path))
    try:
        if api == "fully_shard":
            model = _sharded(MLP(1))
        else:
            model = fsdp_c.FSDP(MLP(1), auto_wrap_policy=ModuleWrapPolicy({Block}))
        _step(model.blocks[0])  # a root of its own, until the model runs
        for _ in range(6):
            assert not (tmp_path / f"rank{rank}.json").exists()
            _step(model)
    finally:
        engine_listeners.pop()
        _automatic._Watcher.taken = False
    dist.barrier()  # all have written
    recorded = trace.load(tmp_path).recorded
    assert [unit.name for unit in recorded[0].units] == ["", "blocks.0"]
    assert len(lanes_of(recorded[0]).steps) == 3
    if api == "fully_shard":
        assert model._fsdp_c_groups[0].before_run is None


@distributed(world_size=2)
def test_nothing_sharded() -> None:
    for function in (explain, fsdp_c.memory_stats, fsdp_c.reset, trace.start):
        with pytest.raises(ValueError, match="no FullyShardedDataParallel module in"):
            function(nn.Linear(2, 2))
        with pytest.raises(TypeError, match="model must be a module"):
            function(3)


@distributed(world_size=2)
def test_functions_of_the_other_api() -> None:
    model = _sharded(MLP(1))
    problem = r"module '' is one of fully_shard\(\)"
    # As in torch; TRL's trainers do so.
    for recurse in (False, True):
        with ExitStack() as stack:
            summoned = fsdp_c.FSDP.summon_full_params(model, recurse=recurse)
            with pytest.warns(match=r"call unshard\(\) and reshard\(\)"):
                stack.enter_context(summoned)
            assert all(isinstance(param, DTensor) for param in model.parameters())
            _step(model)
    with pytest.raises(ValueError, match=problem):
        fsdp_c.FSDP.optim_state_dict(model, torch.optim.SGD(model.parameters()))
