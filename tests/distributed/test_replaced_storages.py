"""Parameters that are given other storages between two calls, by `set_()` or `data =`.

Their values are followed; where they cannot be, an error says what to do instead. What
torch itself moves is the matter of test_moved_shards.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_c import reset
from helpers.distributed import STRATEGIES, distributed
from helpers.models import DIM, Block, vectors
from helpers.reference import Differential, sgd
from helpers.rows import Rows, shard_units

# What FullyShardedDataParallel shards: original or flat parameters; or fully_shard.
DOORS = ("originals", "flat", "rows")


class _Net(nn.Sequential):
    """Units of which one is large enough to be read in place."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, DIM), Block(DIM, 200), nn.Linear(DIM, 3))


def _differential(door: str, strategy: str = "FULL_SHARD") -> Differential:
    if door == "rows":
        options = {"reshard_after_forward": strategy == "FULL_SHARD"}
        shard = functools.partial(shard_units, classes={Block}, **options)
        return Rows(_Net, shard, vectors)
    return Differential.of_units(
        _Net, {Block}, strategy=strategy, use_orig_params=door == "originals"
    )


def _shards(differential: Differential) -> list[Tensor]:
    """Return what this rank holds of the parameters: tensors with their memory."""
    params = differential.model.parameters()
    return [p._local_tensor if isinstance(p, DTensor) else p for p in params]


def _set(shards: list[Tensor]) -> None:
    with torch.no_grad():
        for shard in shards:
            shard.set_(shard.detach().clone())  # type: ignore[call-overload]


def _set_data(shards: list[Tensor]) -> None:
    for shard in shards:
        shard.data = shard.detach().clone()


MOVES = {"set": _set, "data": _set_data}


@pytest.mark.each_value
@pytest.mark.parametrize("how", MOVES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("door", DOORS)
@distributed(world_size=2)
def test_moved(door: str, strategy: str, how: str) -> None:
    """Before the first forward, and between, and within steps."""
    differential = _differential(door, strategy)
    move: Callable[[list[Tensor]], None] = MOVES[how]
    move(_shards(differential))
    differential.train(1)
    move(_shards(differential))
    differential.evaluate()
    differential.zero_grad()
    differential.forward_backward()
    move(_shards(differential))
    differential.checked_step()
    differential.zero_grad()
    with torch.no_grad():  # the values come from where they are now
        for shard in _shards(differential):
            shard.mul_(0.9)
        for param in differential.reference.parameters():
            param.mul_(0.9)
    differential.train(1)


@distributed(world_size=2)
def test_new_local_tensor_that_does_not_fit(rank: int) -> None:
    """An error names the unit; putting the old one back heals."""
    differential = _differential("rows")
    differential.train(1)
    param: Any = next(differential.model.parameters())
    old = param._local_tensor
    param._local_tensor = old.new_zeros(old.shape[0] + 1, *old.shape[1:])
    x = torch.ones(1, DIM).double()
    with pytest.raises(RuntimeError, match="local tensor of parameter 0"):
        differential.model(x)
    param._local_tensor = old
    reset(differential.model)
    differential.zero_grad()
    differential.train(1)


@distributed(world_size=2)
def test_data_that_torch_moves() -> None:
    """Conversions before the first forward are none of that."""
    differential = _differential("rows")
    for dtype in (torch.float32, torch.float64):
        differential.model.to(dtype)
        differential.reference.to(dtype)
    differential.model.load_state_dict(differential.model.state_dict(), assign=True)
    differential.sharded = dict(differential.model.named_parameters())
    differential.optimizer = sgd(differential.model.parameters())
    differential.train(1)


@pytest.mark.parametrize("num_steps", [0, 1])
@distributed(world_size=2)
def test_data_of_a_dtensor(num_steps: int) -> None:
    """`param.data =` would change nothing, so it is an error that says what does."""
    differential = _differential("rows")
    differential.train(num_steps)
    param: Any = next(differential.model.parameters())
    with torch.no_grad():
        param.data = param.data * 2
    x = torch.ones(1, DIM).double()
    with pytest.raises(ValueError, match=r"data of parameter .*0.* was set.*copy_"):
        differential.model(x)
    reset(differential.model)
    differential.zero_grad()
    differential.train(1)
