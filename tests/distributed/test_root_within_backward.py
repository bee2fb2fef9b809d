"""Losses that reach the root's parameters before the root's output does.

Autograd runs the newest operations first, so what a module keeps at the end of its
forward (an auxiliary head's output, tied logits) is reached before the output's hooks.
The root keeps its parameters for backward; all others give them back.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_c
from helpers.distributed import STRATEGIES, distributed
from helpers.impl import fsdp
from helpers.models import DIM, Block, vectors
from helpers.reference import Differential, assert_same
from helpers.rows import Rows, shard_units

# What FullyShardedDataParallel shards: original or flat parameters; or fully_shard.
DOORS = ("originals", "flat", "rows")


class _Net(nn.Module):
    """A unit, between parameters of the root that are used once more at the end."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.inp = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.block = Block(DIM, 32)
        self.head = nn.Linear(DIM, 5, bias=False)
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.block(self.norm(self.inp(x)))
        y: Tensor = self.head(hidden)
        if self.use == "head":
            self.aux = self.head(hidden + x)
        elif self.use == "tied":
            self.aux = F.linear(torch.tanh(hidden), self.inp.weight.t())
        elif self.use == "norm":  # autograd saves its weight itself
            self.aux = self.norm(hidden)
        return y


class _WithAuxiliary(nn.Module):
    """What both losses are of; not a unit."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.net(x)
        aux = getattr(self.net, "module", self.net).aux
        return y, aux


def _differential(use: str, door: str, strategy: str) -> Differential:
    def shard(model: Any) -> nn.Module:
        if door == "rows":
            shard_units(model.net, {Block}, reshard_after_forward=keeps)
        else:
            model.net = fsdp(
                model.net,
                units={Block},
                strategy=strategy,
                use_orig_params=door == "originals",
            )
        return model

    keeps = None if strategy == "FULL_SHARD" else False
    if door == "rows":
        return Rows(lambda: _WithAuxiliary(_Net(use)), shard, vectors)
    return Differential(
        lambda: _WithAuxiliary(_Net(use)),
        shard,
        vectors,
        use_orig_params=door == "originals",
    )


@pytest.mark.each_value
@pytest.mark.parametrize("use", ["head", "tied", "norm"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("door", DOORS)
@distributed(world_size=2)
def test_auxiliary_loss(door: str, strategy: str, use: str) -> None:
    """One loss, and micro-batches, and a forward without gradients between."""
    differential = _differential(use, door, strategy)
    for inside in (None, differential.evaluate):
        for num_forwards in (1, 2):
            differential.zero_grad()
            for _ in range(2):
                differential.forward_backward(num_forwards, inside)
            differential.checked_step()


@pytest.mark.parametrize("door", DOORS)
@distributed(world_size=2)
def test_only_the_auxiliary_loss(door: str, rank: int) -> None:
    """The root's output gets no gradient at all, or in a later backward."""
    differential = _differential("head", door, "FULL_SHARD")
    for retains in (False, True):
        differential.zero_grad()
        batches = differential.batches()
        losses = []
        for batch in batches:
            y, aux = differential.reference(*batch)
            losses.append((aux.pow(4).mean(), y.square().mean()))
        found = differential.model(*batches[rank])
        mine = (found[1].pow(4).mean(), found[0].square().mean())
        for index in range(1 + retains):
            assert_same("loss", mine[index], losses[rank][index])
            mean = torch.stack([each[index] for each in losses]).mean()
            mean.backward(retain_graph=retains)
            mine[index].backward(retain_graph=retains)
        differential.checked_step()


def _nbytes(params: Any) -> int:
    return sum(p.numel() * p.element_size() for p in params)


@pytest.mark.parametrize("is_evaluated", [False, True])
@pytest.mark.parametrize("door", DOORS)
@distributed(world_size=2)
def test_memory_after_forward(door: str, is_evaluated: bool) -> None:
    """That of the root alone is held, until backward, or a forward without one."""
    differential = _differential("head", door, "FULL_SHARD")
    net: Any = differential.reference.net
    root = _nbytes([*net.inp.parameters(), *net.norm.parameters(), net.head.weight])
    padding = 128 * len(list(net.parameters()))
    assert padding < _nbytes(net.block.parameters())
    root_of: Any = differential.model.net
    for _ in range(2):
        if is_evaluated:
            differential.evaluate()
            assert fsdp_c.memory_stats(root_of)["held_nbytes"] == 0
        mean, loss = differential.forward()
        held = fsdp_c.memory_stats(root_of)["held_nbytes"]
        assert root <= held <= root + padding
        mean.backward()
        loss.backward()
        assert fsdp_c.memory_stats(root_of)["held_nbytes"] == 0
        differential.checked_step()
        differential.zero_grad()
