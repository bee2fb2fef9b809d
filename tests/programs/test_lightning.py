"""Lightning's Trainer with its FSDPStrategy, and fsdp_c.install()."""

from typing import Any

import pytest
from torch import Tensor

import fsdp_c
from helpers.distributed import distributed
from helpers.frameworks import (
    STEPS,
    Unsharded,
    environment,
    installed,
    lightning_module,
    trainer_of,
)
from helpers.reference import assert_same_tensors
from helpers.shared_folder import shared_folder


def whole(trainer: Any) -> dict[str, Tensor]:
    state = trainer.strategy.model.state_dict()
    return {name.removeprefix("net."): value for name, value in state.items()}


@pytest.mark.parametrize(
    "kind", [pytest.param("full", marks=pytest.mark.only_full), "sharded"]
)
@distributed(world_size=2, device="cpu", timeout_s=300)
def test_fit_save_resume(rank: int, world_size: int, kind: str) -> None:
    def trainer_until(steps: int, folder: Any) -> Any:
        plugins = [environment(rank, world_size)]
        return trainer_of(
            kind, plugins, devices=world_size, steps=steps, folder=str(folder)
        )

    with installed(), shared_folder() as folder:
        reference = Unsharded(world_size)
        trainer = trainer_until(STEPS, folder)
        trainer.fit(lightning_module(0))
        assert type(trainer.strategy.model) is fsdp_c.FSDP
        reference.train(range(STEPS))
        assert_same_tensors("trained", whole(trainer), reference.model.state_dict())
        path = f"{folder}/checkpoint.ckpt"
        trainer.save_checkpoint(path)

        trainer = trainer_until(2 * STEPS, folder)
        trainer.fit(lightning_module(1), ckpt_path=path, weights_only=False)
        assert trainer.global_step == 2 * STEPS
        reference.train(range(STEPS, 2 * STEPS))
        assert_same_tensors("resumed", whole(trainer), reference.model.state_dict())
