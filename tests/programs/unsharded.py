"""What the programs here are compared with: the model that was never wrapped."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from helpers.impl import FSDP
from helpers.reference import assert_same, assert_same_tensors, clean_name
from helpers.rows import whole_of
from helpers.seeds import seeded


def draw(*shape: int, seed: int) -> Tensor:
    """Return fp64 numbers that depend on ``seed`` alone."""
    generator = seeded(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def mean_over_ranks(loss: Callable[[int], Tensor]) -> Tensor:
    """Return the mean of the losses of all ranks, each of its own data."""
    losses = [loss(rank) for rank in range(dist.get_world_size())]
    return torch.stack(losses).mean()


def check_weights(model: nn.Module, reference: nn.Module) -> None:
    """Fail unless all parameters are those of ``reference``, with either API."""
    expected = {name: p.detach() for name, p in reference.named_parameters()}
    if any(isinstance(param, DTensor) for param in model.parameters()):
        named = dict(model.named_parameters())
        mine = dict(zip(named, whole_of(list(named.values())), strict=True))
        assert_same_tensors("parameter", mine, expected, 1e-9)
        return
    with FSDP.summon_full_params(model, writeback=False):
        mine = {
            clean_name(name): param.detach().clone()
            for name, param in model.named_parameters()
        }
    assert_same_tensors("parameter", mine, expected, 1e-9)


def train_beside(
    reference: nn.Module,
    model: nn.Module,
    loss: Callable[[Any, int, int], Tensor],
    *,
    num_steps: int = 4,
    lr: float = 0.02,
) -> None:
    """Train both with AdamW; compare this rank's losses, and the weights at the end.

    ``loss(module, step, rank)`` is of the data of that rank.
    """
    optimizers = [
        torch.optim.AdamW((p for p in each.parameters() if p.requires_grad), lr)
        for each in (reference, model)
    ]
    rank = dist.get_rank()
    for step in range(num_steps):
        expected = [loss(reference, step, r) for r in range(dist.get_world_size())]
        torch.stack(expected).mean().backward()
        mine = loss(model, step, rank)
        assert_same("loss", mine.detach(), expected[rank].detach(), 1e-9)
        mine.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_weights(model, reference)
