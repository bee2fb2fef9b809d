"""Tensor parallel models between a forward and its backward, where units are kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor

from fsdp_c import FullyShardedDataParallel as FSDP
from helpers.distributed import distributed, varied
from helpers.groups import groups_destroyed
from helpers.reference import assert_same, assert_same_tensors, clean_name
from helpers.tensor_parallel import ParallelFlat, gather_summoned, whole_value

STRATEGIES = (
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "_HYBRID_SHARD_ZERO2",
)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def make(strategy: str, use_orig_params: bool, **options: Any) -> ParallelFlat:
    """Return both models after a step, with gradients."""
    both = ParallelFlat(
        2,
        2,
        num_replicas=1 if "HYBRID" in strategy else None,
        use_orig_params=use_orig_params,
        optimizer=adam,
        sharding_strategy=ShardingStrategy[strategy],
        **options,
    )
    both.forward_backward()
    both.checked_step()
    return both


# What is looked at there --------------------------------------------------------


def _summon(both: ParallelFlat) -> None:
    both.check()


def _state_dict(both: ParallelFlat, kind: str) -> None:
    with FSDP.state_dict_type(both.model, StateDictType[kind]):
        state = both.model.state_dict()
    expected = {n: p.detach() for n, p in both.reference_params.items()}
    assert list(state) == list(expected)
    assert all(isinstance(value, DTensor) for value in state.values())
    found = {name: whole_value(value) for name, value in state.items()}
    assert_same_tensors("state", found, expected, both.tolerance)


def _full(both: ParallelFlat) -> None:
    _state_dict(both, "FULL_STATE_DICT")


def _sharded(both: ParallelFlat) -> None:
    _state_dict(both, "SHARDED_STATE_DICT")


def _optim_state(both: ParallelFlat) -> None:
    found = FSDP.optim_state_dict(both.model, both.optimizer)["state"]
    expected = both.reference_optimizer.state
    assert sorted(found) == sorted(both.reference_params)
    for name, param in both.reference_params.items():
        for key in ("exp_avg", "exp_avg_sq"):
            value = whole_value(found[name][key])
            assert_same(f"{key} of {name}", value, expected[param][key], both.tolerance)


def _clip(both: ParallelFlat) -> None:
    both.clip(0.1)


def _zero(both: ParallelFlat) -> None:
    both.reference.zero_grad()
    both.model.zero_grad()


def _zero_to_zeros(both: ParallelFlat) -> None:
    both.reference.zero_grad(set_to_none=False)
    both.model.zero_grad(set_to_none=False)


def _zero_of_optimizer(both: ParallelFlat) -> None:
    both.zero_grad()


LOOKS: dict[str, Callable[[ParallelFlat], None]] = {
    "summon": _summon,
    "full": _full,
    "sharded": _sharded,
    "optim": _optim_state,
    "clip": _clip,
    "zero": _zero,
    "zeros": _zero_to_zeros,
    "optimizer": _zero_of_optimizer,
}


@varied(strategy=STRATEGIES, use_orig_params=[True, False], look=list(LOOKS))
@distributed(world_size=4)
def test_backward_after_looking(
    strategy: str, use_orig_params: bool, look: str
) -> None:
    """It sees whole values, and the backward is as good as before."""
    with groups_destroyed():
        both = make(strategy, use_orig_params)
        for _ in range(2):
            mean, loss = both.forward()
            LOOKS[look](both)
            mean.backward()
            loss.backward()
            both.check()
        both.checked_step()
        del mean, loss, both
