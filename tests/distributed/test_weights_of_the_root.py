"""Losses that reach weights of the outermost unit before its output does.

Autograd runs the newest operations first, so what a module keeps at the end of its
forward (deep supervision, tied logits, a norm) is reached before the output's hooks.
The root keeps its parameters for backward; all others give them back.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_c
from helpers.distributed import STRATEGIES, distributed
from helpers.models import DIM, Block
from helpers.reference import Differential
from helpers.rows import APIS, in_either_api


class _Net(nn.Module):
    """Keeps what the root's layers make of each block's output, after its own."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.inp = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(DIM, 32) for _ in range(3))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        hidden = [x := block(x) for block in self.blocks]
        out = self._logits(x)
        makes: dict[str, Callable[[Tensor], Tensor]] = {
            "head": self._logits,
            "tied": lambda each: F.linear(torch.tanh(each), self.inp.weight.t()),
            "norm": self.norm,  # autograd saves its weight itself
            "hidden": torch.nn.Identity(),  # of the units alone
        }
        self.kept = [makes[self.use](each) for each in hidden]
        return out

    def _logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)) * self.scale


def _both_losses(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    out = model(x).square().mean()
    net = next(module for module in model.modules() if isinstance(module, _Net))
    return out, torch.stack([(kept**4).mean() for kept in net.kept]).sum()


def _sum_of_both(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack(_both_losses(model, x)).sum()


def _kept_alone(model: nn.Module, x: Tensor) -> Tensor:
    """The output is not in the loss at all."""
    return _both_losses(model, x)[1]


def _two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    return _sum_of_both(model, x) + _sum_of_both(model, 2 * x)


def _evaluated_between(model: nn.Module, x: Tensor) -> Tensor:
    loss = _sum_of_both(model, x)
    with torch.no_grad():
        model(x)
    return loss


LOSSES = (_sum_of_both, _kept_alone, _two_forwards, _evaluated_between)


def _make(
    api: str, use: str = "head", strategy: str = "FULL_SHARD", units: Any = (Block,)
) -> Differential:
    return in_either_api(
        api, lambda: _Net(use), units, strategy=strategy, keeps_root=True
    )


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use", ["head", "tied", "norm", "hidden"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("units", [(Block,), ()])
@distributed(world_size=(1, 2))
def test_kept_outputs(
    api: str, strategy: str, use: str, loss: Callable[..., Tensor], units: Any
) -> None:
    both = _make(api, use, strategy, units)
    for _ in range(2):
        both.zero_grad()
        both.backward_of(loss)
        both.backward_of(loss)
        both.checked_step()


@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_the_output_in_a_later_backward(api: str) -> None:
    both = _make(api)
    batches = both.batches()
    expected = [_both_losses(both.reference, *batch) for batch in batches]
    mine = _both_losses(both.model, *batches[both.rank])
    for index in (1, 0):
        mean = torch.stack([losses[index] for losses in expected]).mean()
        for loss in (mean, mine[index]):
            loss.backward(retain_graph=True)
    both.checked_step()


def _nbytes(params: Any) -> int:
    return sum(p.numel() * p.element_size() for p in params)


@pytest.mark.parametrize("is_evaluated", [False, True])
@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_memory_after_forward(api: str, is_evaluated: bool) -> None:
    """That of the root alone is held, until backward, or a forward without one."""
    both = _make(api)
    net: Any = both.reference
    root = _nbytes(net.parameters()) - _nbytes(net.blocks.parameters())
    padding = 128 * len(list(net.parameters()))
    assert padding < _nbytes(net.blocks[0].parameters())

    def held_nbytes() -> int:
        return fsdp_c.memory_stats(both.model)["held_nbytes"]

    def is_held() -> None:
        assert root <= held_nbytes() <= root + padding

    for _ in range(2):
        if is_evaluated:
            both.evaluate()
            assert held_nbytes() == 0
        both.forward_backward(inside=is_held)
        assert held_nbytes() == 0
        both.checked_step()
        both.zero_grad()
