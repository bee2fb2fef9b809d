"""Mixed precision, against a reference that casts at the same places."""

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_c import fully_shard
from helpers.distributed import distributed, varied
from helpers.groups import kept_mesh
from helpers.impl import FSDP, MixedPrecision, fsdp
from helpers.models import Block
from helpers.reference import Differential, assert_same, with_model


@pytest.mark.trap(22)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16", None])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("model", ["mlp", "transformer"])
@distributed(world_size=(2, 3))
def test_bf16_compute_over_fp32_shards(
    model: str, strategy: str, reduce_dtype: str | None, use_orig_params: bool
) -> None:
    """Parameters, gradients and optimizer stay fp32; compute is bf16."""
    differential = Differential.of_model(
        model,
        strategy=strategy,
        mixed_precision=MixedPrecision(
            torch.bfloat16, reduce_dtype and getattr(torch, reduce_dtype)
        ),
        use_orig_params=use_orig_params,
    )
    differential.train(3)
    for param in differential.model.parameters():
        assert param.dtype == torch.float32
        assert param.grad is None or param.grad.dtype == torch.float32


@varied(use_orig_params=[True, False])
@distributed(world_size=2)
@with_model(
    mixed_precision=MixedPrecision(torch.bfloat16, torch.float32), tolerance=1e-6
)
def test_fp32_reduce_is_exact(differential: Differential) -> None:
    """bf16 gradients that are reduced in fp32 lose nothing on the way."""
    differential.train(1)


@varied(use_orig_params=[True, False])
@pytest.mark.parametrize("no_sync", [True, False])
@distributed(world_size=2)
@with_model(mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
def test_accumulation(differential: Differential, no_sync: bool) -> None:
    """Micro batches in bf16, with and without no_sync."""
    for _ in range(2):
        differential.zero_grad()
        differential.accumulate(3, no_sync=no_sync)
        differential.check()
        differential.clip(0.1)
        differential.step()
        differential.check()


@varied(use_orig_params=[True, False, None])
@distributed(world_size=2)
def test_what_no_sync_keeps(rank: int, use_orig_params: bool | None) -> None:
    """Sums of micro-batches are rounded as torch's class does; None: fully_shard.

    FSDP1 lets autograd add in the parameters' dtype, FSDP2 adds in reduce_dtype.
    """
    low, high = torch.bfloat16, torch.float32
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    batches = torch.randn(2, 3, 4, 5).to(low)  # ranks, micro-batches
    reference = deepcopy(plain).to(low)
    sums = [torch.zeros_like(each, dtype=high) for each in reference.parameters()]
    for of_rank in batches:
        kept = [torch.zeros_like(each) for each in sums]
        for batch in of_rank:
            loss = reference(batch).square().sum()
            for i, grad in enumerate(torch.autograd.grad(loss, reference.parameters())):
                kept[i] += grad
                if use_orig_params is not None:
                    kept[i] = kept[i].to(low).to(high)
        sums = [total + part / 2 for total, part in zip(sums, kept, strict=True)]

    model: Any
    if use_orig_params is None:
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=high)
        model = fully_shard(plain, mp_policy=policy)
        model.set_requires_gradient_sync(False)
        context: AbstractContextManager[None] = nullcontext()
    else:
        precision = MixedPrecision(param_dtype=low, reduce_dtype=high)
        model = fsdp(plain, mixed_precision=precision, use_orig_params=use_orig_params)
        context = model.no_sync()
    with context:
        for batch in batches[rank][:2]:
            model(batch).square().sum().backward()
            for param in model.parameters() if use_orig_params is not None else ():
                assert param.grad.dtype == low
    if use_orig_params is None:
        model.set_requires_gradient_sync(True)
    model(batches[rank][2]).square().sum().backward()
    if use_orig_params is None:
        found = [param.grad.full_tensor() for param in model.parameters()]
    else:
        with FSDP.summon_full_params(model, with_grads=True):
            found = [param.grad.clone() for param in model.parameters()]
    for grad, expected in zip(found, sums, strict=True):
        assert grad.dtype == high
        assert torch.equal(grad, expected)


class _Looks(nn.Module):
    """Remembers the dtypes that it sees in forward."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("offset", torch.ones(6, dtype=torch.float64))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, index: Tensor, *, extra: Any = None) -> Tensor:
        self.seen = {
            "input": x.dtype,
            "index": index.dtype,
            "param": self.fc.weight.dtype,
            "buffer": self.offset.dtype,
        }
        if extra is not None:
            self.seen["extra"] = extra["list"][0].dtype
        out: Tensor = self.fc(x.to(self.fc.weight.dtype))
        return out + self.offset.to(out.dtype)


@distributed(world_size=2)
def test_what_is_cast() -> None:
    """Floating inputs of any nesting and parameters; integers and buffers are not."""
    model = fsdp(
        _Looks(),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        use_orig_params=True,
    )
    x, index = torch.randn(2, 6), torch.arange(3)
    out = model(x, index, extra={"list": [torch.randn(2), "text", None]})
    assert model.module.seen == {
        "input": torch.bfloat16,
        "index": torch.int64,
        "param": torch.bfloat16,
        "buffer": torch.float64,
        "extra": torch.bfloat16,
    }
    assert out.dtype == torch.bfloat16


@varied(how=["FULL_SHARD", "NO_SHARD", "partial", "fully_shard", "replicated"])
@distributed(world_size=3)
def test_mean_of_a_sum_in_a_wider_dtype(rank: int, how: str) -> None:
    """Sums are divided in reduce_dtype, then rounded once to the parameters' dtype."""
    grads = {
        torch.float16: (30000.0, 30000.0, 30000.0),  # whose sum is infinite in fp16
        torch.bfloat16: (0.00128936767578125, 0.00531005859375, 0.005157470703125),
    }
    for dtype, numbers in grads.items():
        module = nn.Linear(4, 3, bias=False, dtype=dtype)
        wide = torch.float32
        if how in ("fully_shard", "replicated"):
            shape = (3, 1) if how == "replicated" else (1, 3)
            fully_shard(
                module,
                mesh=kept_mesh(shape, ("replicate", "shard")),
                mp_policy=MixedPrecisionPolicy(reduce_dtype=wide),
            )
            model: Any = module
        else:
            model = fsdp(
                module,
                strategy="FULL_SHARD" if how == "partial" else how,
                mixed_precision=MixedPrecision(reduce_dtype=wide),
                use_orig_params=True,
            )
        if how == "partial":
            with model.no_sync(sharded=True):
                model(torch.zeros(1, 4, dtype=dtype)).sum().backward()
        model(torch.full((1, 4), numbers[rank], dtype=dtype)).sum().backward()
        mean = (torch.tensor(numbers).sum() / 3).to(dtype)
        for param in model.parameters():
            grad = param.grad.to_local() if isinstance(param, DTensor) else param.grad
            assert grad.dtype == dtype
            assert torch.equal(grad, mean.expand_as(grad)), f"{dtype}: {grad}, {mean}"


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_gradient_of_the_input(use_orig_params: bool) -> None:
    """A cast input gets its gradient in its own dtype."""
    torch.manual_seed(0)
    block = Block()
    x = torch.randn(4, 6, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    half = Block().to(torch.bfloat16)
    half.load_state_dict(block.state_dict())
    half(y.to(torch.bfloat16)).float().square().mean().backward()
    model = fsdp(
        block,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        use_orig_params=use_orig_params,
    )
    model(x).float().square().mean().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert x.grad.dtype == torch.float32
    assert_same("input gradient", x.grad, y.grad, 1e-6)
