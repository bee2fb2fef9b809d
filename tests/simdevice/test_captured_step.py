"""A captured step is a step: the same training, and the same model after it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fsdp_c
from helpers.distributed import distributed
from helpers.impl import fsdp
from simdevice.device import native

DIM = 8
NUM_STEPS = 5


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM)) for _ in range(3)),
        nn.Linear(DIM, DIM),
    )


def shard(api: str, model: nn.Module) -> nn.Module:
    if api == "fully_shard":
        for layer in model:
            fsdp_c.fully_shard(layer)
        return fsdp_c.fully_shard(model)
    return fsdp(
        model, units=(nn.Sequential, nn.Linear), use_orig_params=api == "orig_params"
    )


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    options = {"lr": 1e-2, "capturable": True} | options
    return torch.optim.AdamW(model.parameters(), **options)


def batches(count: int = NUM_STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, DIM), torch.randn(4, DIM)) for _ in range(count)]


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step


def local_values(model: nn.Module) -> list[torch.Tensor]:
    return [
        getattr(param, "_local_tensor", param).detach().clone()
        for param in model.parameters()
    ]


@pytest.mark.parametrize("api", ["fully_shard", "orig_params", "flat_params"])
@distributed(world_size=2, device="sim")
def test_captured_steps_equal_plain_ones(api: str) -> None:
    original = network()
    for seed in range(4):
        native().set_schedule(seed, 1.0)
        plain, captured = (shard(api, copy.deepcopy(original)) for _ in range(2))
        plain_step = step_of(plain, adamw(plain))
        optimizer = adamw(captured)
        step = fsdp_c.capture_step(
            step_of(captured, optimizer), captured, optimizer, warmup=2
        )
        for x, y in batches(2 + NUM_STEPS):
            expected = plain_step(x, y)
            loss = step(x, y)
            assert torch.equal(loss.cpu(), expected.cpu()), f"seed {seed}"
        assert step.is_captured
        for mine, theirs in zip(
            local_values(captured), local_values(plain), strict=True
        ):
            assert torch.equal(mine.cpu(), theirs.cpu()), f"seed {seed}"
