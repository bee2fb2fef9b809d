"""Sharding strategies x use_orig_params, on every small model."""

import pytest
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers.distributed import distributed
from helpers.impl import ShardingStrategy, fsdp, needs_fsdp_c
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
    """Losses, gradients and parameters of three steps."""
    case = CASES[model]
    if case.only_fsdp_c or (case.only_orig_params and not use_orig_params):
        needs_fsdp_c(f"refuses {model} with use_orig_params={use_orig_params}")
    policy = ModuleWrapPolicy(set(case.unit_classes)) if case.unit_classes else None
    differential = Differential.of_case(
        case,
        lambda module: fsdp(
            module,
            auto_wrap_policy=policy,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        ),
        use_orig_params=use_orig_params,
    )
    differential.train(3)
