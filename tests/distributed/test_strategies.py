"""Sharding strategies x use_orig_params, on every small model."""

import pytest

from helpers.distributed import distributed, every_strategy, varied
from helpers.models import CASES
from helpers.reference import Differential, with_model


@pytest.mark.trap(1)
@pytest.mark.trap(2)
@pytest.mark.trap(3)
@pytest.mark.trap(24)
@pytest.mark.trap(30)
@every_strategy
@varied(model=list(CASES))
@distributed(world_size=(2, 3))
@with_model()
def test_training_equals_the_unsharded_model(differential: Differential) -> None:
    """Losses, gradients and parameters; of evaluations before and after too."""
    differential.evaluate()
    differential.train(3)
    differential.evaluate()
