"""Parameters that no rank used have no gradient under ``fully_shard``.

As in torch, so that an optimizer leaves them alone: weight decay shows the difference.
Against the unsharded model, whose loss is the mean over the ranks.
"""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import fsdp_c
from fsdp_c import fully_shard
from helpers.distributed import distributed
from helpers.groups import kept_mesh
from helpers.models import Inputs
from helpers.rows import Rows
from helpers.seeds import seeded
from helpers.transports import OWN, over

DIM = 6
NUM_EXPERTS = 3


class Experts(nn.Module):
    """Uses those of its layers that its input names, and ``always``, if it has one."""

    def __init__(self, has_always: bool) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.zeros(DIM)) if has_always else None
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(NUM_EXPERTS))
        self.scale = nn.Parameter(torch.ones(1))
        self.never = nn.Parameter(torch.ones(DIM))
        self.frozen = nn.Parameter(torch.ones(DIM), requires_grad=False)

    def forward(self, x: Tensor, uses: Tensor) -> Tensor:
        for expert, is_used in zip(self.experts, uses[1:], strict=True):
            if is_used:
                x = x + torch.tanh(expert(x))
        if self.always is not None:
            x = x + self.always
        scaled: Tensor = x * self.scale if uses[0] else x
        return scaled


class Model(nn.Module):
    """Two such blocks, a unit each.

    Backward must reach the same units on all ranks, as in torch; ``always`` sees to it.
    """

    def __init__(self, has_always: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Experts(has_always), Experts(has_always)])
        self.out = nn.Linear(DIM, 3)

    def forward(self, x: Tensor, uses: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, uses[index])
        return self.out(x)


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW with weight decay, which steps a gradient of zeros."""
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.3)


def some(generator: torch.Generator) -> Inputs:
    """Return a batch that uses a random part; ranks differ."""
    uses = torch.rand(2, 1 + NUM_EXPERTS, generator=generator) < 0.3
    return torch.randn(4, DIM, generator=generator), uses


def shard(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def pair(inputs: Any = some, **options: Any) -> Rows:
    return Rows(Model, lambda m: shard(m, **options), inputs, optimizer=adamw)


@pytest.mark.parametrize("transport", [OWN, "c10d"])
@pytest.mark.parametrize("reshards", [True, False])
@distributed(world_size=(1, 2, 3))
def test_training(transport: str, reshards: bool) -> None:
    """Every rank uses other parts in each step, and some are used by none."""
    with over(transport):
        both = pair(reshard_after_forward=reshards)
        both.train(6)
        del both


@distributed(world_size=2)
def test_accumulation() -> None:
    """A gradient stays until it is cleared; what no micro-batch used has none."""
    both = pair()
    for schedule in ("s", "n", "nn", "s"):
        both.zero_grad()
        for kind in schedule:
            both.model.set_requires_gradient_sync(kind == "s")
            both.forward_backward()
        both.model.set_requires_gradient_sync(True)
        both.forward_backward()
        both.check()
        both.forward_backward()
        both.checked_step()
    both.reference.blocks[0].scale.grad = None
    both.model.blocks[0].scale.grad = None
    both.forward_backward()
    both.check()


@distributed(world_size=4)
def test_replicas() -> None:
    """Over both dimensions of a mesh, and with gradients kept in one of them."""
    mesh = kept_mesh((2, 2), ("replicate", "shard"))
    both = pair(mesh=mesh)
    both.train(3)
    for _ in range(3):
        both.zero_grad()
        both.accumulate_in_shards(3)
        both.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@distributed(world_size=2)
def test_low_precision(rank: int, dtype: torch.dtype) -> None:
    """Marks are exact in any reduce dtype."""
    model = shard(Model(), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    uses = torch.zeros(2, 1 + NUM_EXPERTS, dtype=torch.bool)
    uses[0, 1 + rank] = True
    model(torch.ones(2, DIM), uses).sum().backward()
    with_grads = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_grads == {
        *(f"blocks.{i}.always" for i in range(2)),
        *(f"blocks.0.experts.{i}.{p}" for i in range(2) for p in ("weight", "bias")),
        "out.weight",
        "out.bias",
    }


@distributed(world_size=2)
def test_as_torch(rank: int) -> None:
    """The same gradients are None, where ranks do not differ."""
    torch.manual_seed(0)
    ours, theirs = Model(has_always=False), Model(has_always=False)
    theirs.load_state_dict(ours.state_dict())
    shard(ours)
    for block in theirs.blocks:
        torch_fully_shard(block)
    torch_fully_shard(theirs)
    optimizers = [adamw(list(model.parameters())) for model in (ours, theirs)]
    for step in range(4):
        _, uses = some(seeded(step))
        x = torch.randn(4, DIM, generator=seeded(rank))
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            model(x, uses).sum().backward()
            optimizer.step()
        for (name, mine), other in zip(
            ours.named_parameters(), theirs.parameters(), strict=True
        ):
            assert (mine.grad is None) == (other.grad is None), name
            assert isinstance(mine, DTensor)
            assert isinstance(other, DTensor)
            torch.testing.assert_close(mine.to_local(), other.to_local())
        for optimizer in optimizers:
            optimizer.zero_grad()


@distributed(world_size=2)
def test_reduce_scatter_unused_params() -> None:
    """With it they have zeros, as in torch; also of a block that all left out."""
    model = shard(Model(has_always=False))
    model.set_reduce_scatter_unused_params(True)
    uses = torch.zeros(2, 1 + NUM_EXPERTS, dtype=torch.bool)
    for _ in range(2):
        out = model(torch.ones(2, DIM), uses)
        assert out.requires_grad
        out.sum().backward()
        for name, param in model.named_parameters():
            if not param.requires_grad:
                assert param.grad is None, name
            elif name.startswith("out"):
                assert param.grad.to_local().abs().sum() > 0, name
            else:
                assert param.grad.to_local().abs().sum() == 0, name
    model.set_reduce_scatter_unused_params(False)
    model.zero_grad()
    model(torch.ones(2, DIM), uses).sum().backward()
    assert model.blocks[0].scale.grad is None
    assert fsdp_c.memory_stats(model)["num_units"] == 3


class _Half(nn.Module):
    """A rank uses one of two layers in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor, use: Tensor) -> Tensor:
        return torch.tanh(self.layers[int(use)](x))


class _Twice(nn.Module):
    """Two calls. Backward comes to ``first`` after all gradients of its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.first = nn.Tanh()
        self.part = _Half()

    def forward(self, x: Tensor, uses: Tensor) -> Tensor:
        calls = [self.part(self.first(self.inp(x)), use) for use in uses]
        return torch.stack(calls).sum(0)


def _one_unit(model: Any) -> Any:
    fully_shard([model.first, model.part])
    return fully_shard(model)


def _one_of_two(generator: torch.Generator) -> Inputs:
    uses = torch.rand(2, generator=generator) < 0.5
    return torch.randn(4, DIM, generator=generator), uses


@pytest.mark.parametrize("transport", [OWN, "c10d"])
@distributed(world_size=2)
def test_a_rank_that_is_done_sooner_with_a_unit(transport: str) -> None:
    """It does not gather the unit for a module without parameters: others do not.

    A rank with gradients of all parameters reshards when they have come, one without
    when backward has left the unit.
    """
    with over(transport):
        both = Rows(_Twice, _one_unit, _one_of_two)
        both.train_on(lambda model, *batch: model(*batch).square().mean(), 8)
