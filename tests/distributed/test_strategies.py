"""Sharding strategies x use_orig_params, on every small model."""

import pytest

from helpers.distributed import distributed, every_strategy
from helpers.models import CASES
from helpers.reference import Differential


@pytest.mark.trap(1)
@pytest.mark.trap(2)
@pytest.mark.trap(3)
@pytest.mark.trap(24)
@pytest.mark.trap(30)
@every_strategy
@pytest.mark.parametrize("model", CASES)
@distributed(world_size=(2, 3))
def test_training_equals_the_unsharded_model(
    model: str, strategy: str, use_orig_params: bool
) -> None:
    """Losses, gradients and parameters; of evaluations before and after too."""
    CASES[model]
    differential = Differential.of_model(
        model, strategy=strategy, use_orig_params=use_orig_params
    )
    differential.evaluate()
    differential.train(3)
    differential.evaluate()
