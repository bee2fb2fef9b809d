"""litgpt's model, loss and checkpoint functions over Fabric, with fsdp_c.install()."""

from pathlib import Path

import pytest
import torch.distributed as dist

import fsdp_c
from helpers.distributed import distributed
from helpers.frameworks import (
    STEPS,
    Unsharded,
    environment,
    fabric_of,
    fabric_setup,
    fabric_train,
    installed,
    litgpt_task,
)
from helpers.reference import assert_same_tensors
from helpers.shared_folder import shared_folder


@pytest.mark.parametrize(
    "kind", [pytest.param("full", marks=pytest.mark.only_full), "sharded"]
)
@distributed(world_size=2, device="cpu", timeout_s=300)
def test_train_save_resume(rank: int, world_size: int, kind: str) -> None:
    """litgpt.pretrain's way to save and resume."""
    task = litgpt_task()
    with installed(), shared_folder() as folder:
        plugins = [environment(rank, world_size)]
        fabric = fabric_of(kind, plugins, devices=world_size, task=task)
        first, second = (fabric_setup(fabric, task, seed) for seed in (0, 1))
        assert type(first["model"]._forward_module) is fsdp_c.FSDP
        fabric_train(fabric, task, first, range(STEPS))
        path = Path(folder) / "lit_model.pth"
        fabric.save(path, first)
        dist.barrier()
        fabric.load(path, second)
        assert second["step"] == STEPS
        fabric_train(fabric, task, second, range(STEPS, 2 * STEPS))
        reference = Unsharded(world_size, task)
        reference.train(range(2 * STEPS))
        state = dict(second["model"]._forward_module.state_dict())
        assert_same_tensors("resumed", state, reference.model.state_dict())
