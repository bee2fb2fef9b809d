"""Lightning's Trainer with its FSDPStrategy, and fsdp_c.install().

On the CPU the strategy runs as a subclass only, see test_fabric.py; and torch's FSDP1
does not run in it, so the unsharded model is what is compared with.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp_c
from helpers.distributed import distributed
from helpers.frameworks import (
    STEPS,
    Unsharded,
    batch,
    build,
    environment,
    framework,
    installed,
    optimizer,
)
from helpers.models import Block
from helpers.reference import assert_same_tensors
from helpers.shared_folder import shared_folder


def trainer_of(rank: int, world_size: int, kind: str, folder: str, steps: int) -> Any:
    pl = framework("lightning.pytorch")

    class OnCPU(framework("lightning.pytorch.strategies").FSDPStrategy):
        """The Trainer asks for a GPU if it is FSDPStrategy itself."""

    return pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=OnCPU(auto_wrap_policy={Block}, state_dict_type=kind),
        plugins=[environment(rank, world_size)],
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )


def module_of(rank: int, seed: int) -> Any:
    pl = framework("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build(seed)

        def training_step(self, _: Tensor, __: int) -> Tensor:
            data = batch(self.trainer.global_step, rank)
            return self.net(data).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer(self)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(range(100), batch_size=None)

    return Module()


def whole(trainer: Any) -> dict[str, Tensor]:
    state = trainer.strategy.model.state_dict()
    return {name.removeprefix("net."): value for name, value in state.items()}


@pytest.mark.parametrize("kind", ["full", "sharded"])
@distributed(world_size=2, device="cpu", timeout_s=300)
def test_fit_save_resume(rank: int, world_size: int, kind: str) -> None:
    with installed(), shared_folder() as folder:
        reference = Unsharded(world_size)
        trainer = trainer_of(rank, world_size, kind, folder, STEPS)
        trainer.fit(module_of(rank, 0))
        assert type(trainer.strategy.model) is fsdp_c.FSDP
        reference.train(range(STEPS))
        assert_same_tensors("trained", whole(trainer), reference.model.state_dict())
        path = f"{folder}/checkpoint.ckpt"
        trainer.save_checkpoint(path)

        trainer = trainer_of(rank, world_size, kind, folder, 2 * STEPS)
        trainer.fit(module_of(rank, 1), ckpt_path=path, weights_only=False)
        assert trainer.global_step == 2 * STEPS
        reference.train(range(STEPS, 2 * STEPS))
        assert_same_tensors("resumed", whole(trainer), reference.model.state_dict())
