"""Modules with which torch's kernels end the process if they run with shards.

Weights of torch.nn.utils.parametrizations are computed wherever they are read.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from helpers.distributed import distributed
from helpers.impl import FSDP, fsdp
from helpers.models import DIM
from helpers.rows import APIS, in_either_api

PARAMETRIZATIONS = [weight_norm, orthogonal]


class _Part(nn.Module):
    def __init__(self, parametrize: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.fc = parametrize(nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        # Computed twice: in the module's forward, and here.
        return torch.tanh(self.fc(x)) * self.fc.weight.norm()


def _make(api: str, parametrize: Callable[[Any], nn.Module]) -> Any:
    return in_either_api(
        api,
        lambda: nn.Sequential(_Part(parametrize), _Part(parametrize)),
        {_Part},
    )


@pytest.mark.parametrize("parametrize", PARAMETRIZATIONS)
@pytest.mark.parametrize("api", APIS)
@distributed(world_size=(1, 2))
def test_training(api: str, parametrize: Callable[[Any], nn.Module]) -> None:
    differential = _make(api, parametrize)
    differential.train(3)
    differential.evaluate()


def _refusal(what: str, api: str) -> str:
    """Return what is said; parameters behind a flat one refuse every reader."""
    return "is sharded now" if api == "FSDP flat" else f"{what} needs whole parameters"


@pytest.mark.parametrize("parametrize", PARAMETRIZATIONS)
@pytest.mark.parametrize("api", ["FSDP", "FSDP flat"])
@distributed(world_size=(1, 2))
def test_between_steps(
    world_size: int, api: str, parametrize: Callable[[Any], nn.Module]
) -> None:
    """Shards have no weight: with those of weight_norm the process ended."""
    differential = _make(api, parametrize)
    differential.train(1)
    model = differential.model
    unit = model.module[1]
    if world_size > 1:
        with pytest.raises(RuntimeError, match=_refusal(r"'fc\.weight'", api)):
            _ = unit.module.fc.weight
    with FSDP.summon_full_params(model):
        torch.testing.assert_close(
            unit.module.fc.weight, differential.reference[1].fc.weight
        )
    differential.train(1)


class _WithLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(DIM, DIM, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x.unsqueeze(1))[0]
        return out.squeeze(1)


@pytest.mark.parametrize("api", ["FSDP", "FSDP flat"])
@distributed(world_size=2)
def test_an_lstm_called_alone(api: str) -> None:
    """The unit's module was not called, so nothing was gathered."""
    differential = in_either_api(api, _WithLSTM, {})
    x = torch.ones(2, 3, DIM, dtype=torch.float64)
    differential.train(1)
    rnn = differential.model.module.rnn
    with pytest.raises(RuntimeError, match=_refusal("'rnn'", api)):
        rnn(x)
    with FSDP.summon_full_params(differential.model), torch.no_grad():
        torch.testing.assert_close(rnn(x), differential.reference.rnn(x))
    differential.train(1)


@pytest.mark.parametrize("api", ["FSDP", "FSDP flat"])
@distributed(world_size=2)
def test_hooks_of_weight_norm(api: str) -> None:
    """Those of torch.nn.utils compute the weight before the module's forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        layer = nn.utils.weight_norm(nn.Linear(DIM, 3))
    expected = layer(torch.ones(2, DIM)).detach()
    model = fsdp(nn.Sequential(layer), use_orig_params=api == "FSDP")
    x = torch.ones(2, DIM)
    torch.testing.assert_close(model(x), expected.to(x.device))
    with pytest.raises(RuntimeError, match=_refusal("'0'", api)):
        layer(x)
    torch.testing.assert_close(model(x), expected.to(x.device))
