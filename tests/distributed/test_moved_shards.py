"""Memory of shards that torch moves, or that the user replaces.

`share_memory_()` and queues of torch.multiprocessing put other memory into the storage
of a tensor, `set_()` and `data =` give it another one. The shard lies there from then
on. What would lose its values, or change nothing, is refused by name. Compared with the
unsharded model; tests/programs/test_weights_to_a_process.py has such a queue.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_c import reset
from helpers.distributed import STRATEGIES, distributed
from helpers.models import BATCH, DIM, Inputs, vectors
from helpers.reference import Differential
from helpers.rows import APIS, as_double, in_either_api

WIDTH = 64  # its unit is read in place, by two ranks


class _Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, WIDTH), nn.Tanh(), nn.Linear(WIDTH, DIM))


class _Net(nn.Sequential):
    """A unit that is large enough to be read in place, and a small root."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, DIM), _Wide(), nn.Linear(DIM, 3))


def _inputs(generator: torch.Generator) -> Inputs:
    return as_double(vectors(generator))


def _locals(params: list[nn.Parameter]) -> list[Tensor]:
    """Return what this rank holds of the parameters: tensors with their memory."""
    return [p._local_tensor if isinstance(p, DTensor) else p for p in params]


def _share(params: list[nn.Parameter], factor: float = 1.0) -> None:
    for local in _locals(params):
        local.detach().share_memory_()
        assert local.is_shared()
        if factor != 1.0:
            local.mul_(factor)


def _set(params: list[nn.Parameter], factor: float) -> None:
    for local in _locals(params):
        local.set_(factor * local.detach())  # type: ignore[call-overload]


def _set_data(params: list[nn.Parameter], factor: float) -> None:
    for local in _locals(params):
        local.data = factor * local.detach()


def _replace_locals(params: list[Any], factor: float) -> None:
    for param in params:
        param._local_tensor = factor * param._local_tensor.detach()


MOVES: dict[str, Callable[[list[Any], float], None]] = {
    "share": _share,
    "set": _set,
    "data": _set_data,
    "local tensor": _replace_locals,
}


def _move(both: Differential, how: str) -> None:
    """Put half the values elsewhere."""
    with torch.no_grad():
        MOVES[how](list(both.model.parameters()), 0.5)
        for param in both.reference.parameters():
            param.mul_(0.5)


ON_CPU = pytest.mark.cpu_only("memory of a device is shared in another way")


@ON_CPU
@pytest.mark.parametrize(
    ("api", "how"),
    [
        (api, how)
        for api in APIS
        for how in MOVES
        if how != "local tensor" or api == "fully_shard"
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=(1, 2))
def test_moved(api: str, how: str, strategy: str) -> None:
    """Before the first forward, between steps, within one; and written to there."""
    both = in_either_api(api, _Net, {_Wide}, _inputs, strategy=strategy)
    for _ in range(2):
        _move(both, how)
        both.train(1)
        _move(both, how)
        both.evaluate()
        both.zero_grad()
        both.forward_backward()
        _move(both, how)
        both.checked_step()
        both.scale_params(0.9)


@ON_CPU
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=(1, 2))
def test_shared_before_backward(api: str, strategy: str) -> None:
    """The parameters that the optimizer has, once gathered and once not yet."""
    both = in_either_api(api, _Net, {_Wide}, _inputs, strategy=strategy)
    params = list(both.model.parameters())
    both.train(3, inside=lambda: _share(params))


# What is refused ----------------------------------------------------------------


def _empty_one(model: nn.Module) -> None:
    """Empty the storage of the root's first weight, and of all that are in it."""
    local = _locals([next(p for p in model.parameters() if p.numel() > 0)])[0]
    local.untyped_storage().resize_(0)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("has_run", [False, True])
@distributed(world_size=(1, 2))
def test_storages_that_are_emptied(api: str, has_run: bool) -> None:
    """The error names the unit, also before the first forward, and the remedy."""
    both = in_either_api(api, _Net, {_Wide}, _inputs)
    if has_run:
        both.forward_backward()
    _empty_one(both.model)
    x = torch.ones(BATCH, DIM, dtype=torch.float64)
    with pytest.raises(
        (ValueError, RuntimeError), match=r"FSDP.*unit '\w*_Net'.* 0 bytes.*expected"
    ):
        both.model(x)
    reset(both.model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("num_steps", [0, 1])
@distributed(world_size=(1, 2))
def test_new_data_of_sharded_parameters(num_steps: int, strategy: str) -> None:
    """Of a DTensor it changes nothing, in torch either: an error says what does."""
    both = in_either_api("fully_shard", _Net, {_Wide}, _inputs, strategy=strategy)
    both.train(num_steps)
    param = both.model[1][0].weight
    x = torch.ones(BATCH, DIM, dtype=torch.float64)
    param.data = 2 * param.detach()
    unit = "unit '1'.*" if num_steps else ""
    with pytest.raises(ValueError, match=rf"{unit}data of parameter .*0.*copy_"):
        both.model(x)
    reset(both.model)
    both.zero_grad()
    both.train(1)  # it was told once


@distributed(world_size=2)
def test_a_local_tensor_that_does_not_fit() -> None:
    """An error names the unit; putting the old one back heals."""
    both = in_either_api("fully_shard", _Net, {_Wide}, _inputs)
    both.train(1)
    param: Any = next(both.model.parameters())
    old = param._local_tensor
    param._local_tensor = old.new_zeros(old.shape[0] + 1, *old.shape[1:])
    with pytest.raises(RuntimeError, match="local tensor of parameter 0"):
        both.model(torch.ones(1, DIM, dtype=torch.float64))
    param._local_tensor = old
    reset(both.model)
    both.zero_grad()
    both.train(1)
