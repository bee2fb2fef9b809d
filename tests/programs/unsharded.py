"""What the programs here are compared with: the model that was never wrapped."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from helpers.impl import FSDP
from helpers.reference import assert_same_tensors, clean_name
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


def check_weights(
    model: nn.Module, reference: nn.Module, tolerance: float = 1e-9
) -> None:
    """Fail unless all parameters are those of ``reference``, with either API."""
    expected = {name: p.detach() for name, p in reference.named_parameters()}
    if any(isinstance(param, DTensor) for param in model.parameters()):
        named = dict(model.named_parameters())
        mine = dict(zip(named, whole_of(list(named.values())), strict=True))
        assert_same_tensors("parameter", mine, expected, tolerance)
        return
    with FSDP.summon_full_params(model, writeback=False):
        mine = {
            clean_name(name): param.detach().clone()
            for name, param in model.named_parameters()
        }
    assert_same_tensors("parameter", mine, expected, tolerance)
