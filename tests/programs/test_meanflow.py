"""MeanFlow: the average velocity of a flow, whose target has a derivative along it.

u(z, r, t) is trained towards v - (t - r) du/dt, the total derivative by torch.func.jvp
in the same forward as u; samples take one step. Compared with the model that was never
sharded, and the data of all ranks.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jvp

from helpers.distributed import distributed
from helpers.rows import shard_by
from programs.unsharded import draw, train_beside

DIM, WIDTH, BATCH = 6, 24, 8


class _Layer(nn.Module):
    """Modulated by the times, as blocks of a DiT are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, h: Tensor, times: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(times).chunk(3, dim=-1)
        result: Tensor = h + gate * self.mlp(self.norm(h) * (1 + scale) + shift)
        return result


class _Velocity(nn.Module):
    """u(z, r, t)."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, WIDTH)
        self.times = nn.Sequential(nn.Linear(2, WIDTH), nn.SiLU())
        self.layers = nn.ModuleList(_Layer() for _ in range(3))
        self.out = nn.Linear(WIDTH, DIM)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        h, times = self.inp(z), self.times(torch.cat([t, t - r], dim=-1))
        for layer in self.layers:
            h = layer(h, times)
        result: Tensor = self.out(h)
        return result


def _loss(model: Any, step: int, rank: int) -> Tensor:
    seed = 100 * step + 10 * rank
    data, noise = draw(BATCH, DIM, seed=seed), draw(BATCH, DIM, seed=seed + 1)
    times = draw(BATCH, 2, seed=seed + 2).sigmoid()
    r, t = times.min(-1, keepdim=True).values, times.max(-1, keepdim=True).values
    z, v = (1 - t) * data + t * noise, noise - data
    tangents = (v, torch.zeros_like(r), torch.ones_like(t))
    u, du_dt = jvp(model, (z, r, t), tangents)
    error = (u - (v - (t - r) * du_dt).detach()).square().sum(-1)
    weight = 1 / (error.detach() + 1e-3)  # adaptive, as in the paper
    return (weight * error).mean()


def _sample(model: Any) -> Tensor:
    noise, zero = draw(BATCH, DIM, seed=7), torch.zeros(BATCH, 1, dtype=torch.float64)
    with torch.no_grad():
        return noise - model(noise, zero, zero + 1)


@pytest.mark.parametrize(
    "api",
    ["FSDP", pytest.param("FSDP flat", marks=pytest.mark.only_full), "fully_shard"],
)
@distributed(world_size=2)
def test_meanflow(api: str) -> None:
    """Twelve steps of AdamW, and a sample of one step."""
    torch.manual_seed(0)
    reference = _Velocity().double()
    model = shard_by(api, copy.deepcopy(reference), {_Layer})
    train_beside(reference, model, _loss, num_steps=12, lr=3e-3)
    torch.testing.assert_close(_sample(model), _sample(reference))
