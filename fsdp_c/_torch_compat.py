"""The only file that touches torch's private names; one place per torch version."""

from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_PREFIX as CHECKPOINT_PREFIX,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_WRAPPED_MODULE as CHECKPOINT_WRAPPED_MODULE,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
)
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp.api import ShardingStrategy
from torch.distributed.fsdp.wrap import _Policy as Policy
from torch.nn import Module

__all__ = [
    "CHECKPOINT_PREFIX",
    "CHECKPOINT_WRAPPED_MODULE",
    "HYBRID_SHARD_ZERO2",
    "IN_BACKWARD_OPTIMIZERS",
    "ActivationWrapper",
    "Policy",
    "TrainingState",
    "run_policy",
]

# What torch.distributed.optim._apply_optimizer_in_backward() leaves on parameters.
IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"

HYBRID_SHARD_ZERO2 = ShardingStrategy._HYBRID_SHARD_ZERO2


def run_policy(
    policy: Policy,
    root: Module,
    ignored_modules: set[Module],
    root_kwargs: dict[str, Any],
) -> dict[Module, dict[str, Any]]:
    """Return the constructor arguments of every module that ``policy`` wraps."""
    return policy._run_policy(root, ignored_modules, root_kwargs)
