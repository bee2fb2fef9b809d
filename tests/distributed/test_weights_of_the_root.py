"""Losses that reach weights of the outermost unit before its output does.

A head that a module kept, deep supervision, a weight in the loss: autograd gets to them
first, so they are whole from the start of backward. Compared with the unsharded model
on the data of all ranks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import distributed
from helpers.models import DIM, Block
from helpers.reference import Differential
from helpers.rows import in_either_api

APIS = ("FSDP", "FSDP flat", "fully_shard")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")


class _Net(nn.Module):
    """Keeps what the root's layers make of each block's output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        # The output first: backward goes the other way.
        out, *self.kept = [
            self.head(self.norm(each)) * self.scale for each in hidden[::-1]
        ]
        return out


def _net_of(model: nn.Module) -> _Net:
    return next(module for module in model.modules() if isinstance(module, _Net))


def _heads(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x).square().mean()
    return out + sum((kept**4).mean() for kept in _net_of(model).kept)


def _heads_alone(model: nn.Module, x: Tensor) -> Tensor:
    """The output is not in the loss at all."""
    model(x)
    return torch.stack([kept.square().mean() for kept in _net_of(model).kept]).sum()


def _two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    return _heads(model, x) + _heads(model, 2 * x)


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "heads": _heads,
    "heads alone": _heads_alone,
    "two forwards": _two_forwards,
}


def _train(both: Differential, loss: Callable[[Any, Tensor], Tensor]) -> None:
    for _ in range(2):
        batches = both.batches()
        both.zero_grad()
        losses = [loss(both.reference, *batch) for batch in batches]
        torch.stack(losses).mean().backward()
        mine = loss(both.model, *batches[both.rank])
        both.check_loss(mine, losses[both.rank].detach())
        mine.backward()
        both.checked_step()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("units", [(Block,), ()])
@distributed(world_size=(1, 2))
def test_kept_outputs(api: str, strategy: str, loss: str, units: Any) -> None:
    """The root has a norm and a scale, whose weights autograd saves itself."""
    _train(
        in_either_api(api, _Net, units, strategy=strategy, keeps_root=True),
        LOSSES[loss],
    )
