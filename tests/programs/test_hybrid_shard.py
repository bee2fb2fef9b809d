"""HYBRID_SHARD with a policy and no groups, as Lightning Fabric passes it.

Fabric gives FSDP the strategy and a policy, and neither groups nor a mesh; each rank
reads its own part of the data. On the CPU torch's FSDP1 then shards over one rank (it
counts one CPU a node), makes NO_SHARD of that, and reduces nothing.
"""

import torch
from torch import Tensor, nn

from helpers.distributed import distributed
from helpers.groups import groups_destroyed
from helpers.impl import fsdp
from programs.unsharded import draw, train_beside


def _build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(8, 2)).double()


@distributed(world_size=(2, 4))
def test_weights() -> None:
    """The ranks of a host shard over each other."""
    with groups_destroyed():
        _train()


def _train() -> None:
    reference = _build()
    model = fsdp(
        _build(), strategy="HYBRID_SHARD", units={nn.Linear}, use_orig_params=True
    )

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        out: Tensor = module(draw(4, 8, seed=10 * step + rank))
        return out.square().mean()

    train_beside(reference, model, loss, lr=0.05)
