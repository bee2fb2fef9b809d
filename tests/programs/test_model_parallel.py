"""Lightning Fabric and its ModelParallelStrategy, which calls `fully_shard`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)

import fsdp_c
from helpers.distributed import distributed
from helpers.frameworks import environment, installed, require
from helpers.groups import groups_destroyed
from helpers.shared_folder import shared_folder
from programs.unsharded import check_weights, draw, mean_over_ranks

MAX_NORM = 0.1
STEPS = 2
ACCUMULATION = 2


def _build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2)), nn.Linear(7, 3)
    ).double()


def _shard(model: Any, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model[:-1]:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    module: nn.Module = model
    return module


def _loss(model: nn.Module, batch: int, rank: int) -> Tensor:
    out: Tensor = model(draw(4, 7, seed=10 * batch + rank))
    return out.square().mean() / ACCUMULATION


class _Run:
    """A training loop of Fabric, and its state."""

    def __init__(self, fabric: Any, seed: int, meta: bool) -> None:
        self.fabric = fabric
        if meta:
            with torch.device("meta"):
                model = _build()
            self.model = fabric.setup(model)
            set_model_state_dict(
                self.inner,
                _build(seed).state_dict(),
                options=StateDictOptions(full_state_dict=True),
            )
        else:
            self.model = fabric.setup(_build(seed))
        self.optimizer = fabric.setup_optimizers(
            torch.optim.AdamW(self.model.parameters(), lr=0.02)
        )

    @property
    def inner(self) -> nn.Module:
        module: nn.Module = self.model._forward_module
        return module

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, steps: range, rank: int) -> list[float]:
        norms = []
        for step in steps:
            for micro in range(ACCUMULATION):
                last = micro == ACCUMULATION - 1
                with self.fabric.no_backward_sync(self.model, enabled=not last):
                    self.fabric.backward(
                        _loss(self.model, step * ACCUMULATION + micro, rank)
                    )
            norm = self.fabric.clip_gradients(
                self.model, self.optimizer, max_norm=MAX_NORM
            )
            norms.append(float(norm.full_tensor()))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return norms


def _unsharded(num_steps: int) -> tuple[nn.Module, list[float]]:
    model, norms = _build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(num_steps):
        for micro in range(ACCUMULATION):
            batch = step * ACCUMULATION + micro
            mean_over_ranks(lambda r, b=batch: _loss(model, b, r)).backward()
        norms.append(
            float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        )
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def _fabric(rank: int, kind: str) -> Any:
    import lightning
    from lightning.fabric.strategies import ModelParallelStrategy

    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=2,
        plugins=[environment(rank, 2)],
        strategy=ModelParallelStrategy(
            _shard,
            data_parallel_size=2,
            tensor_parallel_size=1,
            save_distributed_checkpoint=kind == "sharded",
            process_group_backend="gloo",
        ),
    )
    fabric.launch()
    return fabric


def _train_save_resume(fabric: Any, rank: int, meta: bool, path: Path) -> None:
    run = _Run(fabric, 0, meta)
    assert isinstance(run.inner, fsdp_c.FSDPModule)
    reference, norms = _unsharded(STEPS)
    mine = run.train(range(STEPS), rank)
    torch.testing.assert_close(mine, norms)
    check_weights(run.inner, reference)

    fabric.save(path, run.state)
    dist.barrier()
    run = _Run(fabric, 1, meta)
    fabric.load(path, run.state)
    check_weights(run.inner, reference)
    run.train(range(STEPS, 2 * STEPS), rank)
    check_weights(run.inner, _unsharded(2 * STEPS)[0])


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("meta", [False, True])
@distributed(world_size=2, device="cpu", timeout_s=300)
def test_train_save_resume(rank: int, kind: str, meta: bool) -> None:
    require("lightning")
    with installed(), shared_folder() as folder, groups_destroyed():
        path = Path(folder) / "checkpoint"
        _train_save_resume(_fabric(rank, kind), rank, meta, path)
