"""Lightning Fabric and its FSDPStrategy, with fsdp_c.install().

Fabric has its FSDPStrategy run on GPUs only, but looks at the class itself: a subclass
runs on the CPU. There torch's FSDP1 does not run in it (it passes no device_id), so the
unsharded model is what is compared with.
"""

from typing import Any

import pytest
import torch

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

MAX_NORM = 0.05


def fabric_of(rank: int, world_size: int, kind: str, **kwargs: Any) -> Any:
    class OnCPU(framework("lightning.fabric.strategies").FSDPStrategy):
        """Fabric asks for a GPU if it is FSDPStrategy itself."""

    strategy = OnCPU(auto_wrap_policy={Block}, state_dict_type=kind, **kwargs)
    fabric = framework("lightning.fabric").Fabric(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        plugins=[environment(rank, world_size)],
    )
    fabric.launch()
    return fabric


def setup(fabric: Any, seed: int) -> tuple[Any, Any]:
    model = fabric.setup_module(build(seed))
    return model, fabric.setup_optimizers(optimizer(model))


def train(fabric: Any, model: Any, optim: Any, steps: range) -> None:
    for step in steps:
        loss = model(batch(step, fabric.global_rank)).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optim, max_norm=MAX_NORM)
        optim.step()
        optim.zero_grad()


def whole(model: Any) -> dict[str, torch.Tensor]:
    return dict(model._forward_module.state_dict())


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu", timeout_s=300)
def test_train_save_resume(
    rank: int, world_size: int, kind: str, use_orig_params: bool
) -> None:
    with installed(), shared_folder() as folder:
        fabric = fabric_of(rank, world_size, kind, use_orig_params=use_orig_params)
        model, optim = setup(fabric, 0)
        assert type(model._forward_module) is fsdp_c.FSDP
        reference = Unsharded(world_size)
        train(fabric, model, optim, range(STEPS))
        reference.train(range(STEPS), MAX_NORM)
        expected = reference.model.state_dict()
        assert_same_tensors("trained", whole(model), expected)

        path = f"{folder}/checkpoint"
        fabric.save(path, {"model": model, "optim": optim, "step": STEPS})
        model, optim = setup(fabric, 1)
        state = {"model": model, "optim": optim, "step": 0}
        fabric.load(path, state)
        assert state["step"] == STEPS
        assert_same_tensors("loaded", whole(model), expected)
        train(fabric, model, optim, range(STEPS, 2 * STEPS))
        reference.train(range(STEPS, 2 * STEPS), MAX_NORM)
        assert_same_tensors("resumed", whole(model), reference.model.state_dict())


@distributed(world_size=2, device="cpu", timeout_s=300)
def test_loads_a_plain_file(rank: int, world_size: int) -> None:
    """load_raw() of a file that holds the unsharded model's parameters."""
    with installed(), shared_folder() as folder:
        reference = build(3)
        if rank == 0:
            torch.save(reference.state_dict(), f"{folder}/plain.pt")
        torch.distributed.barrier()
        fabric = fabric_of(rank, world_size, "full")
        model, _ = setup(fabric, 0)
        fabric.load_raw(f"{folder}/plain.pt", model)
        assert_same_tensors("loaded", whole(model), reference.state_dict(), 0.0)


@distributed(world_size=2, device="cpu", timeout_s=300)
def test_accumulation_and_checkpointing(rank: int, world_size: int) -> None:
    """no_backward_sync(), and activation checkpointing of the blocks."""
    with installed():
        fabric = fabric_of(
            rank, world_size, "full", activation_checkpointing_policy={Block}
        )
        model, optim = setup(fabric, 0)
        reference = Unsharded(world_size)
        for step in range(2):
            with fabric.no_backward_sync(model, enabled=step == 0):
                fabric.backward(model(batch(step, rank)).square().mean())
            for each in range(world_size):
                loss = reference.model(batch(step, each)).square().mean()
                (loss / world_size).backward()
        optim.step()
        reference.optim.step()
        assert_same_tensors("trained", whole(model), reference.model.state_dict())
