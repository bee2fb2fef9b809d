"""fully_shard: an integer ``reshard_after_forward``, and Shards of any dimension."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_c import fully_shard
from helpers.distributed import distributed
from helpers.groups import groups_destroyed
from helpers.rows import Rows


def last_dim(param: nn.Parameter) -> Shard:
    """Cut a parameter along its last dimension."""
    return Shard(param.ndim - 1)


@pytest.mark.parametrize("model", ["mlp", "transformer", "uneven", "called_twice"])
@pytest.mark.parametrize("placement", [None, last_dim])
@distributed(world_size=4)
def test_training(model: str, placement: Any) -> None:
    """Backward gathers in groups of 2; with accumulation and evaluation between."""
    with groups_destroyed():
        both = Rows.of(model, reshard_after_forward=2, shard_placement_fn=placement)
        both.train(2)
        both.run("zns")
        both.evaluate()  # no weights of it are left after the step
        both.step()
        both.evaluate()
        both.train(1)


@pytest.mark.parametrize("dim", [0, 1])
@distributed(world_size=4)
def test_what_the_modules_show(rank: int, dim: int) -> None:
    """Between forward and backward, DTensors over the small groups."""
    with groups_destroyed():
        show(rank, dim)


def show(rank: int, dim: int) -> None:
    """Look at one unit inside a root."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 5))
    whole = model[0].weight.detach().clone()
    fully_shard(
        model[0], reshard_after_forward=2, shard_placement_fn=lambda _: Shard(dim)
    )
    fully_shard(model, shard_placement_fn=lambda _: Shard(0))
    sharded = model[0].weight
    output = model(torch.randn(3, 5))
    part = model[0].weight
    assert isinstance(part, DTensor)
    assert isinstance(part, nn.Parameter)
    assert part.placements == (Replicate(), Shard(dim))
    assert tuple(part.device_mesh.shape) == (2, 2)
    assert torch.equal(part.to_local(), whole.chunk(2, dim)[rank % 2])
    assert part.to_local().is_contiguous()
    assert torch.equal(part.full_tensor(), whole)
    output.sum().backward()
    assert model[0].weight is sharded
    # A state dict has the sharded ones, whenever it is made.
    output = model(torch.randn(3, 5))
    assert model[0].weight is part
    assert model.state_dict()["0.weight"].placements == (Shard(dim),)
    assert model[0].weight is sharded
    output.sum().backward()
    # A forward that leaves it out does not leave its part registered.
    model(torch.randn(3, 5))
    model.forward = lambda x: x @ model[1].weight  # type: ignore[method-assign]
    model(torch.randn(3, 5))
    assert model[0].weight is sharded
    del model.forward
    model(torch.randn(3, 5))
    assert model[0].weight is part
    model.set_reshard_after_forward(True)
    model(torch.randn(3, 5))
    assert model[0].weight is sharded


@distributed(world_size=4)
def test_memory_between_forward_and_backward() -> None:
    """A rank holds a half of the unit, in param dtype."""
    with groups_destroyed():
        model: Any = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(2)])
        for module in model:
            fully_shard(module, reshard_after_forward=2)
        fully_shard(model)
        output = model(torch.randn(3, 64))
        for module in model:
            assert (
                module.weight.to_local().untyped_storage().nbytes() == 64 * 64 * 4 // 2
            )
            assert module._fsdp_c_groups[0].unit.state == "PARTED"
        output.sum().backward()
        for module in model:
            assert module._fsdp_c_groups[0].unit.state == "SHARDED"


@distributed(world_size=3)
def test_columns_are_contiguous(rank: int) -> None:
    """Parameters, gradients and what forward sees, uneven parts included."""
    torch.manual_seed(0)
    model: Any = nn.Linear(7, 4)
    whole = model.weight.detach().clone()
    seen = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.weight.view(-1).clone())
            return super().forward(x)

    model.__class__ = Looks
    fully_shard(model, shard_placement_fn=last_dim)
    model(torch.randn(2, 7)).sum().backward()
    assert torch.equal(seen[0], whole.view(-1))
    for tensor in (model.weight, model.weight.grad):
        assert tensor.is_contiguous()
        assert tensor.to_local().is_contiguous()
    assert torch.equal(model.weight.to_local(), whole.chunk(3, 1)[rank])


@pytest.mark.cpu_only("gloo sums in host memory")
@distributed(world_size=4)
def test_low_precision_gradients_have_the_bits_of_torchs(rank: int) -> None:
    """Sums of bf16 are rounded after each addition, in the same order."""
    torch.manual_seed(rank)
    x = torch.randn(3, 16).bfloat16()
    grads = []
    for shard in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model: Any = nn.Linear(16, 8, bias=False)
        shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
        model(x).square().sum().backward()
        grads.append(model.weight.grad.to_local())
    assert torch.equal(*grads)
