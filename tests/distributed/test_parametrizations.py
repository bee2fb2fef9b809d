"""torch.nn.utils.parametrizations: weights that are computed of parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from helpers.distributed import distributed
from helpers.impl import FSDP
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


@pytest.mark.parametrize("parametrize", PARAMETRIZATIONS)
@pytest.mark.parametrize("api", ["FSDP", "FSDP flat"])
@distributed(world_size=(1, 2))
def test_between_steps(
    world_size: int, api: str, parametrize: Callable[[Any], nn.Module]
) -> None:
    """Whole parameters have the weight; of parts torch's kernel ends the process."""
    differential = _make(api, parametrize)
    differential.train(1)
    model = differential.model
    unit = model.module[1]
    if world_size > 1:
        with pytest.raises(RuntimeError, match=r"'fc\.weight' cannot be computed"):
            _ = unit.module.fc.weight
    with FSDP.summon_full_params(model):
        torch.testing.assert_close(
            unit.module.fc.weight, differential.reference[1].fc.weight
        )
    differential.train(1)
