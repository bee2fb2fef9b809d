"""Composer's Trainer with parallelism_config={"fsdp": ...}, and fsdp_c.install().

Composer wraps for GPUs only: it asks CUDA for its device, which the test answers with
the CPU. torch's FSDP1 does not run in it there: the unsharded model is the reference.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

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
    framework,
    installed,
    optimizer,
)
from helpers.models import Block
from helpers.reference import assert_same_tensors
from helpers.shared_folder import shared_folder

# What Composer imports of a package that has no build for a torch without CUDA.
TORCHVISION = [
    "torchvision.datasets",
    "torchvision.models",
    "torchvision.models.resnet",
    "torchvision.ops",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.utils",
]


def composer() -> Any:
    framework("composer.algorithms", "torchvision", *TORCHVISION)
    return framework("composer")


def model_of(seed: int) -> Any:
    class Model(composer().ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = build(seed)
            vars(self.net)["fsdp_wrap_fn"] = lambda module: isinstance(module, Block)

        def forward(self, data: Tensor) -> Tensor:
            return self.net(data)

        def loss(self, outputs: Tensor, _: Tensor) -> Tensor:
            return outputs.square().mean()

    return Model()


def trainer_of(rank: int, kind: str, folder: str, seed: int, **options: Any) -> Any:
    """Return a trainer of ``2 * STEPS`` batches that saves after ``STEPS``."""
    model = model_of(seed)
    return composer().Trainer(
        model=model,
        train_dataloader=[batch(step, rank) for step in range(2 * STEPS)],
        optimizers=optimizer(model),
        max_duration=f"{2 * STEPS}ba",
        device="cpu",
        precision="fp32",
        device_train_microbatch_size=4,
        progress_bar=False,
        save_folder=folder,
        save_filename="ep{epoch}-ba{batch}-rank{rank}",
        save_interval=f"{STEPS}ba",
        save_overwrite=True,
        parallelism_config={"fsdp": {"state_dict_type": kind}},
        **options,
    )


def whole(trainer: Any) -> dict[str, Tensor]:
    net = trainer.state.model.net
    assert type(net) is fsdp_c.FSDP
    return dict(net.state_dict())


def end(trainer: Any) -> None:
    trainer.close()
    del trainer.state.model.net  # Composer keeps its model until the process ends


@contextmanager
def on_cpu(rank: int, world_size: int) -> Iterator[None]:
    """What Composer's launcher sets, and a CPU for the device that it asks for."""
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
    }
    cpu = torch.device("cpu")
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch("torch.cuda.current_device", return_value=cpu),
    ):
        yield


@pytest.mark.parametrize(
    "kind", [pytest.param("full", marks=pytest.mark.only_full), "sharded"]
)
@distributed(world_size=2, device="cpu", timeout_s=300)
def test_fit_save_resume(rank: int, world_size: int, kind: str) -> None:
    composer()
    with installed(), shared_folder() as folder, on_cpu(rank, world_size):
        trainer = trainer_of(rank, kind, folder, seed=0)
        trainer.fit()
        reference = Unsharded(world_size)
        reference.train(range(2 * STEPS))
        assert_same_tensors("trained", whole(trainer), reference.model.state_dict())
        end(trainer)

        name = f"ep0-ba{STEPS}" + ("-rank{rank}" if kind == "full" else "")
        path = f"{folder}/{name}"
        trainer = trainer_of(rank, kind, folder, seed=1, load_path=path)
        trainer.fit()
        assert trainer.state.timestamp.batch == 2 * STEPS
        assert_same_tensors("resumed", whole(trainer), reference.model.state_dict())
        end(trainer)
