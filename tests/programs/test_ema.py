"""An average of the weights kept by hand, over what `parameters()` yields.

It is put in the parameters' place for an evaluation, and taken out again. With
SHARD_GRAD_OP torch's FSDP1 keeps units whole after an evaluation, and trains on with
the average's weights.
"""

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import distributed
from helpers.impl import fsdp
from programs.unsharded import check_weights, draw, mean_over_ranks


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3)), nn.Linear(7, 3)
    ).double()


def _put(params: list[nn.Parameter], values: list[Tensor], how: str) -> None:
    for param, value in zip(params, values, strict=True):
        if how == "copy":
            param.copy_(value)
        elif how == "copy to data":
            param.data.copy_(value)
        else:
            param.data = value.clone()


class _Averaged:
    """A training loop with its average."""

    def __init__(self, model: nn.Module, how: str) -> None:
        self.model, self.how = model, how
        self.params = list(model.parameters())
        self.average = [param.detach().clone() for param in self.params]
        self.optimizer = torch.optim.SGD(self.params, lr=0.3)
        self.outputs: list[Tensor] = []

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for param, value in zip(self.params, self.average, strict=True):
                value.lerp_(param, 0.5)
            kept = [param.detach().clone() for param in self.params]
            _put(self.params, self.average, self.how)
            self.outputs.append(self.model(draw(4, 7, seed=1)))
            _put(self.params, kept, self.how)


@pytest.mark.parametrize("how", ["copy", "copy to data", "new data"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=2)
def test_weights(rank: int, strategy: str, use_orig_params: bool, how: str) -> None:
    """Of training, of the average, and of the evaluations between."""
    model = fsdp(
        _build(), strategy=strategy, units={nn.Linear}, use_orig_params=use_orig_params
    )
    mine, expected = _Averaged(model, how), _Averaged(_build(), how)

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        out: Tensor = module(draw(4, 7, seed=10 * step + rank))
        return out.square().mean()

    for step in range(4):
        mine.step(loss(model, step, rank))
        expected.step(
            mean_over_ranks(lambda r, step=step: loss(expected.model, step, r))
        )
    for output, other in zip(mine.outputs, expected.outputs, strict=True):
        torch.testing.assert_close(output, other)
    check_weights(model, expected.model)
    with torch.no_grad():
        for each in (mine, expected):
            _put(each.params, each.average, how)
    check_weights(model, expected.model)
