"""Lightning Fabric and its FSDPStrategy, with fsdp_c.install()."""

from typing import Any

import pytest
import torch

import fsdp_c
from helpers.distributed import distributed
from helpers.frameworks import (
    MLP_TASK,
    STEPS,
    Unsharded,
    batch,
    build,
    environment,
    fabric_of,
    fabric_setup,
    fabric_train,
    installed,
)
from helpers.models import Block
from helpers.reference import assert_same_tensors
from helpers.shared_folder import shared_folder

MAX_NORM = 0.05


def fabric_on(rank: int, world_size: int, kind: str, **options: Any) -> Any:
    plugins = [environment(rank, world_size)]
    return fabric_of(kind, plugins, devices=world_size, task=MLP_TASK, **options)


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return dict(state["model"]._forward_module.state_dict())


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu", timeout_s=300)
def test_train_save_resume(
    rank: int, world_size: int, kind: str, use_orig_params: bool
) -> None:
    with installed(), shared_folder() as folder:
        fabric = fabric_on(rank, world_size, kind, use_orig_params=use_orig_params)
        state = fabric_setup(fabric, MLP_TASK, 0)
        assert type(state["model"]._forward_module) is fsdp_c.FSDP
        reference = Unsharded(world_size)
        fabric_train(fabric, MLP_TASK, state, range(STEPS), MAX_NORM)
        reference.train(range(STEPS), MAX_NORM)
        expected = reference.model.state_dict()
        assert_same_tensors("trained", whole(state), expected)

        path = f"{folder}/checkpoint"
        fabric.save(path, state)
        state = fabric_setup(fabric, MLP_TASK, 1)
        fabric.load(path, state)
        assert state["step"] == STEPS
        assert_same_tensors("loaded", whole(state), expected)
        fabric_train(fabric, MLP_TASK, state, range(STEPS, 2 * STEPS), MAX_NORM)
        reference.train(range(STEPS, 2 * STEPS), MAX_NORM)
        assert_same_tensors("resumed", whole(state), reference.model.state_dict())


@distributed(world_size=2, device="cpu", timeout_s=300)
def test_loads_a_plain_file(rank: int, world_size: int) -> None:
    """load_raw() of a file that holds the unsharded model's parameters."""
    with installed(), shared_folder() as folder:
        reference = build(3)
        if rank == 0:
            torch.save(reference.state_dict(), f"{folder}/plain.pt")
        torch.distributed.barrier()
        fabric = fabric_on(rank, world_size, "full")
        state = fabric_setup(fabric, MLP_TASK, 0)
        fabric.load_raw(f"{folder}/plain.pt", state["model"])
        assert_same_tensors("loaded", whole(state), reference.state_dict(), 0.0)


@distributed(world_size=2, device="cpu", timeout_s=300)
def test_accumulation_and_checkpointing(rank: int, world_size: int) -> None:
    """no_backward_sync(), and activation checkpointing of the blocks."""
    with installed():
        fabric = fabric_on(
            rank, world_size, "full", activation_checkpointing_policy={Block}
        )
        state = fabric_setup(fabric, MLP_TASK, 0)
        model = state["model"]
        reference = Unsharded(world_size)
        for step in range(2):
            with fabric.no_backward_sync(model, enabled=step == 0):
                fabric.backward(model(batch(step, rank)).square().mean())
            for each in range(world_size):
                loss = reference.model(batch(step, each)).square().mean()
                (loss / world_size).backward()
        state["optim"].step()
        reference.optim.step()
        assert_same_tensors("trained", whole(state), reference.model.state_dict())
