"""fully_shard: checkpointing, precision, conversions, state dicts, recovery."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_c import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import kept_mesh
from helpers.models import CASES, Block, Chain, vectors
from helpers.rows import Rows, shard_units
from helpers.seeds import seeded


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@distributed(world_size=2)
def test_mixed_precision(
    rank: int, world_size: int, reduce_dtype: torch.dtype | None, casts: bool
) -> None:
    """Dtypes of parameters in forward, inputs, outputs, gradients."""
    seen = []

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.weight.dtype, x.dtype))
            return super().forward(x.to(self.weight.dtype))

    model = nn.Sequential(Looks(4, 4), Looks(4, 4))
    reference = copy.deepcopy(model).to(torch.bfloat16)
    policy = MixedPrecisionPolicy(
        torch.bfloat16,
        reduce_dtype,
        output_dtype=torch.float64,
        cast_forward_inputs=casts,
    )
    for module in model:
        fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    torch.manual_seed(0)
    inputs = [torch.randn(3, 4) for _ in range(world_size)]
    out = model(inputs[rank])
    assert out.dtype == torch.float64
    out.float().square().mean().backward()
    # The second layer gets the first one's output.
    inputs_seen = [torch.bfloat16] * 2 if casts else [torch.float32, torch.float64]
    assert seen == [(torch.bfloat16, dtype) for dtype in inputs_seen]
    for each in inputs:
        loss = reference(each.to(torch.bfloat16)).double().float().square().mean()
        (loss / world_size).backward()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert param.dtype == torch.float32
        assert param.grad.dtype == torch.float32
        torch.testing.assert_close(
            param.grad.full_tensor(), expected.grad.float(), rtol=0.1, atol=0.02
        )


@pytest.mark.parametrize("dim", [0, 1, -1])
@distributed(world_size=(2, 3))
def test_placement_fn(rank: int, world_size: int, dim: int) -> None:
    """Other dimensions, divisible by the number of ranks or not."""

    def choose(param: nn.Parameter) -> Shard:
        return Shard(dim if param.ndim > 1 else 0)

    both = Rows.of("transformer", shard_placement_fn=choose)
    both.train(3)
    for param in both.model.parameters():
        if param.ndim > 1:
            whole = param.full_tensor()
            chunks = list(whole.chunk(world_size, dim))
            assert torch.equal(param.to_local(), chunks[rank])


@distributed(world_size=2)
def test_writes_between_steps() -> None:
    """In-place writes to sharded parameters, also while a block is kept."""
    both = Rows.of("mlp", reshard_after_forward=False)
    both.train(1)
    both.model.set_requires_gradient_sync(False)
    both.forward_backward()
    both.scale_params(0.5)
    both.model.set_requires_gradient_sync(True)
    both.forward_backward()
    both.check()


@distributed(world_size=2)
def test_finalize_backward() -> None:
    """It reduces what backwards have kept; one that reduced leaves nothing to do."""
    both = Rows.of("mlp")
    both.model.set_manual_backward_finalization(True)
    assert both.model.finalize_backward() is None  # before the first forward
    for async_op in (True, False):
        both.model.set_requires_gradient_sync(False)
        both.forward_backward()
        both.forward_backward()
        both.model.set_requires_gradient_sync(True)
        handle = both.model.finalize_backward(async_op=async_op)
        assert (handle is not None) == async_op
        if handle is not None:
            handle.wait()
        both.checked_step()
    both.forward_backward()
    both.model.finalize_backward()
    both.check()
    both.model.set_manual_backward_finalization(False)
    with pytest.raises(RuntimeError, match="requires manual backward finalization"):
        both.model.finalize_backward()
    block: Any = next(
        m for m in both.model.modules() if type(m).__name__ == "FSDPBlock"
    )
    for method in (
        block.finalize_backward,
        block.reset_iter_state,
        lambda: block.set_manual_backward_finalization(True),
    ):
        with pytest.raises(RuntimeError, match="on the root"):
            method()


@distributed(world_size=2)
def test_gradients_that_the_user_sets() -> None:
    """Backward adds to them; cleared ones start anew."""
    both = Rows.of("mlp")
    both.train(1)
    for param, like in zip(
        both.model.parameters(), both.reference.parameters(), strict=True
    ):
        like.grad = torch.full_like(like, 0.25)
        param.grad = distribute_tensor(
            like.grad.clone(), param.device_mesh, param.placements
        )
    both.forward_backward()
    both.check()
    first, like = next(
        zip(both.model.parameters(), both.reference.parameters(), strict=True)
    )
    first.grad = like.grad = None
    both.forward_backward()
    both.check()


@pytest.mark.parametrize("async_op", [True, False])
@distributed(world_size=2)
def test_unshard(async_op: bool) -> None:
    """Plain parameters until reshard(), before the first forward too."""
    both = Rows.of("mlp")
    block: Any = next(m for m in both.model.modules() if isinstance(m, FSDPModule))
    names = dict(block.named_parameters())
    handle = block.unshard(async_op=async_op)
    if async_op:
        handle.wait()
    else:
        assert handle is None
    for name, param in block.named_parameters(recurse=False):
        assert not isinstance(param, DTensor)
        assert torch.equal(param, both.reference_params[name])
    block.reshard()
    assert dict(block.named_parameters()) == names
    block.unshard(async_op=async_op)
    both.train(2)
    with both.unsharded():
        for name, param in both.model.named_parameters():
            assert torch.equal(param, both.model.get_parameter(name))
            assert not isinstance(param, DTensor)
            torch.testing.assert_close(param, both.reference_params[name])
    both.train(1)


class TwoLinears(nn.Module):
    """What is run of the second one is up to the subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Linear(4, 4)


@pytest.mark.parametrize("async_op", [True, False])
@distributed(world_size=2)
def test_unshard_before_the_first_forward(async_op: bool) -> None:
    """The root, which then makes an engine of its own, keeps it, as in torch."""

    class Outer(TwoLinears):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.first(x), self.inner.weight)

    both = Rows(
        Outer,
        lambda model: shard_units(model, [nn.Linear]),
        lambda g: (torch.randn(3, 4, generator=g),),
    )
    inner: Any = both.model.inner
    for _ in range(2):
        handle = inner.unshard(async_op=async_op)
        if async_op:
            handle.wait()
        both.train(1)
    inner.unshard(async_op=True)  # nobody waits: no error, nothing left over
    both.model.reshard()
    inner.reshard()
    assert isinstance(inner.weight, DTensor)


@distributed(world_size=2)
def test_parameters_used_without_forward() -> None:
    """unshard() in the forward of another module, whose parameters it uses."""

    class Outer(TwoLinears):
        def forward(self, x: Tensor) -> Tensor:
            inner: Any = self.inner
            if isinstance(inner, FSDPModule):
                inner.unshard()
            return nn.functional.linear(self.first(x), inner.weight, inner.bias)

    both = Rows(
        Outer,
        lambda model: shard_units(model, [nn.Linear]),
        lambda g: (torch.randn(3, 4, generator=g),),
    )
    both.train(3)


@distributed(world_size=2)
def test_meta_device() -> None:
    """Sharded on meta, then to_empty() and initialised; or loaded with assign."""
    like = CASES["uneven"].build().double()
    with torch.device("meta"):
        model = CASES["uneven"].build().double()
    shard_units(model, [Block])
    objects = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="meta device"):
        model(torch.randn(2, 6, dtype=torch.float64))
    whole = like.state_dict()
    state = {
        name: distribute_tensor(whole[name], p.device_mesh, p.placements)
        if isinstance(p, DTensor)
        else whole[name]
        for name, p in model.state_dict().items()
    }
    with torch.device("meta"):
        assigned = CASES["uneven"].build().double()
    shard_units(assigned, [Block])
    assigned.load_state_dict(copy.deepcopy(state), assign=True)
    model.to_empty(device=TEST_DEVICE)
    model.load_state_dict(state)
    (inputs,) = CASES["uneven"].inputs(seeded(0))
    inputs = inputs.double()
    expected = like(inputs)
    for each in (model, assigned):
        torch.testing.assert_close(each(inputs), expected)
    model.reshard()  # the root stays whole for a backward
    for name, param in model.named_parameters():
        assert param is objects[name]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("in_shards", [False, True])
@distributed(world_size=4)
def test_conversion_while_gradients_accumulate(in_shards: bool, keeps: bool) -> None:
    """One that changes nothing keeps them; others are refused, and change nothing."""
    mesh = kept_mesh((2, 2), ("replicate", "shard"))
    both = Rows(  # the root has no parameters
        lambda: Chain(Block() for _ in range(2)),
        lambda model: shard_units(model, [Block], mesh=mesh),
        vectors,
    )
    both.train(1)
    both.zero_grad()
    sync = both.model.set_requires_gradient_sync
    sync = both.model.set_requires_all_reduce if in_shards else sync
    both.model.set_reshard_after_backward(not keeps)
    sync(False)
    both.forward_backward()
    both.model.to(TEST_DEVICE).double()
    with pytest.raises(RuntimeError, match="gradients that no backward has red"):
        both.model.float()
    sync(True)
    both.forward_backward()
    both.check()
    both.zero_grad()
    both.model.float()
    assert all(p.dtype == torch.float32 for p in both.model.parameters())


@distributed(world_size=2)
def test_replaced_by_load_state_dict() -> None:
    """assign=True after a step."""
    both = Rows.of("mlp")
    both.train(1)
    both.model.load_state_dict(copy.deepcopy(both.model.state_dict()), assign=True)
    both.forward()
    module: Any = next(m for m in both.model.modules() if isinstance(m, nn.Linear))
    module.weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError, match="no longer the DTensor"):
        both.forward()


@distributed(world_size=2)
def test_written_after_unshard() -> None:
    """The next forward sees what was written into the DTensors; torch's does not."""
    both = Rows.of("mlp")
    for _ in range(2):
        both.train(1)
        both.model.unshard()
        with torch.no_grad():
            for params in (both.sharded, both.reference_params):
                for param in params.values():
                    param.mul_(0.9)
        both.zero_grad()
        both.forward_backward()
        both.check()
