"""fully_shard: training against the unsharded model in fp64."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_c import FSDPModule, fully_shard
from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import kept_mesh
from helpers.models import CASES, MLP, Block, vectors
from helpers.rows import Rows, shard_units

MODELS = sorted(set(CASES) - {"scalar", "mixed_dtype", "tied"})


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@distributed(world_size=(2, 3, 4))
def test_training(model: str, reshard_after_forward: bool | None) -> None:
    """Every kind of model, its parameters and gradients after every step.

    Also on more ranks than some parameters have rows.
    """
    both = Rows.of(model, reshard_after_forward=reshard_after_forward)
    both.train(3)
    both.evaluate()
    both.train(1)


@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)])
@distributed(world_size=4)
def test_hybrid_mesh(shape: tuple[int, int], no_sync: bool) -> None:
    """(replicate, shard), with accumulation."""
    both = Rows.of("uneven", mesh=kept_mesh(shape, ("replicate", "shard")))
    both.train(2)
    both.zero_grad()
    both.accumulate(2, no_sync=no_sync)
    both.checked_step()
    param = next(iter(both.model.parameters()))
    assert param.placements == (Replicate(), Shard(0))


@distributed(world_size=2)
def test_sync_of_single_modules() -> None:
    """Without recurse the flag is the module's own."""
    both = Rows.of("mlp")
    blocks = [m for m in both.model.modules() if isinstance(m, Block)]
    both.model.set_requires_gradient_sync(False, recurse=False)
    blocks[0].set_requires_gradient_sync(False)
    both.forward_backward()
    held = {id(p) for p in blocks[0].parameters()}
    for param in blocks[0].parameters():
        assert param.grad is None
    assert any(p.grad is not None for p in both.model.parameters() if id(p) not in held)
    both.model.set_requires_gradient_sync(True)
    both.forward_backward()
    both.check()


@distributed(world_size=3)
def test_rows_are_those_of_chunk(rank: int, world_size: int) -> None:
    """What a rank holds, uneven and empty parts included."""
    model = CASES["uneven"].build()
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    shard_units(model, [Block])
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert param.placements == (Shard(0),)
        assert param.shape == whole[name].shape
        chunks = list(whole[name].chunk(world_size))
        expected = chunks[rank] if rank < len(chunks) else whole[name][:0]
        assert torch.equal(param.to_local(), expected), name


@distributed(world_size=2)
def test_what_the_modules_show() -> None:
    """Plain parameters inside forward, DTensors outside; gradients of DTensors."""
    seen = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((type(self.weight), self.weight.shape))
            return super().forward(x)

    model: Any = nn.Sequential(Looks(4, 6), nn.ReLU(), Looks(6, 2))
    for module in model:
        if isinstance(module, Looks):
            fully_shard(module)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    assert isinstance(model, TorchFSDPModule)
    assert isinstance(model, nn.Sequential)
    assert type(model[0]).__name__ == "FSDPLooks"
    assert type(model[:2]) is nn.Sequential
    before = dict(model.named_parameters())
    model(torch.randn(3, 4)).sum().backward()
    assert seen == [
        (nn.Parameter, torch.Size([6, 4])),
        (nn.Parameter, torch.Size([2, 6])),
    ]
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, param in after.items():
        assert param is before[name]
        assert isinstance(param, nn.Parameter)
        assert isinstance(param.grad, DTensor)
    grads = {name: param.grad for name, param in after.items()}
    held = after["0.weight"].grad.to_local().clone()
    kept = after["0.weight"].grad
    ids = {name: id(grad) for name, grad in grads.items()}
    del grads
    model.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    assert torch.equal(kept.to_local(), held)  # the user has it
    assert after["0.weight"].grad is not kept
    if TEST_DEVICE == "cpu":  # the others are the same objects
        for name, param in after.items():
            assert (id(param.grad) == ids[name]) == (name != "0.weight"), name


@distributed(world_size=2)
def test_groups_of_modules() -> None:
    """A list of modules is one unit."""

    def shard(model: nn.Module) -> Any:
        blocks = [m for m in model.modules() if isinstance(m, Block)]
        fully_shard(blocks[:2])
        fully_shard(blocks[2:])
        return fully_shard(model)

    both = Rows(MLP, shard, vectors)
    both.train(3)


@distributed(world_size=2)
def test_without_a_root() -> None:
    """Sharded modules in a plain one are roots of their own."""

    def shard(model: nn.Module) -> Any:
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                fully_shard(module)
        return model

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.last = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.first(x)))

    both = Rows(Plain, shard, lambda g: (torch.randn(5, 6, generator=g),))
    both.train(3)
