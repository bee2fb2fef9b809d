"""Sharding strategies x use_orig_params, on every small model."""

import pytest

from helpers.distributed import distributed
from helpers.impl import needs_fsdp_c
from helpers.models import CASES
from helpers.reference import Differential

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


@pytest.mark.trap(1)
@pytest.mark.trap(2)
@pytest.mark.trap(3)
@pytest.mark.trap(24)
@pytest.mark.trap(30)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", CASES)
@distributed(world_size=(2, 3))
def test_training_equals_the_unsharded_model(
    rank: int, world_size: int, model: str, strategy: str, use_orig_params: bool
) -> None:
    """Losses, gradients and parameters; of evaluations before and after too."""
    case = CASES[model]
    if case.only_fsdp_c or (case.only_orig_params and not use_orig_params):
        needs_fsdp_c(f"refuses {model} with use_orig_params={use_orig_params}")
    differential = Differential.of_model(
        model, strategy=strategy, use_orig_params=use_orig_params
    )
    differential.evaluate()
    differential.train(3)
    differential.evaluate()
