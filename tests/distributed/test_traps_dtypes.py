"""Traps around dtypes: which inputs are cast, batch norm in full precision.

What a number stands for is in tests/lint/test_traps.py.
"""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers.distributed import distributed
from helpers.impl import FSDP, MixedPrecision, fsdp
from helpers.models import Block
from helpers.reference import assert_same_tensors, full_state_dict


class _Sees(nn.Module):
    """Remembers the dtypes of its inputs and of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, index: Tensor, mask: Tensor) -> Tensor:
        self.seen = [x.dtype, index.dtype, mask.dtype, self.fc.weight.dtype]
        return self.fc(x.to(self.fc.weight.dtype))


class _Outer(nn.Module):
    """Feeds its inner unit with fp32, integers and booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Sees()
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, index: Tensor, mask: Tensor) -> Tensor:
        self.seen = [x.dtype, index.dtype, mask.dtype]
        return self.inner(x.float(), index, mask)


@pytest.mark.trap(21)
@pytest.mark.parametrize("casts_nested", [None, True, False])
@pytest.mark.parametrize("casts_root", [None, True, False])
@distributed(world_size=2)
def test_which_inputs_are_cast(
    casts_root: bool | None, casts_nested: bool | None
) -> None:
    """By default the root's are and a nested unit's are not; only floating ones."""
    low, index, boolean = torch.bfloat16, torch.int64, torch.bool
    kwargs: dict[str, Any] = {"param_dtype": low}
    if casts_root is not None:
        kwargs["cast_root_forward_inputs"] = casts_root
    if casts_nested is not None:
        kwargs["cast_forward_inputs"] = casts_nested
    model = fsdp(
        _Outer(),
        units={_Sees},
        mixed_precision=MixedPrecision(**kwargs),
        use_orig_params=True,
    )
    inputs = (torch.randn(2, 6), torch.arange(3), torch.ones(2, dtype=torch.bool))
    out = model(*inputs)
    defaults = MixedPrecision()
    root = defaults.cast_root_forward_inputs if casts_root is None else casts_root
    nested = defaults.cast_forward_inputs if casts_nested is None else casts_nested
    # torch 2.13: a root's inputs are cast by either of the two.
    root_dtype = low if root or nested else torch.float32
    assert model.module.seen == [root_dtype, index, boolean]
    nested_dtype = low if nested else torch.float32
    assert model.inner.module.seen == [nested_dtype, index, boolean, low]
    assert out.dtype == low
    assert inputs[0].dtype == torch.float32
    out.float().sum().backward()


class _Normed(nn.Module):
    """Batch norm between two blocks of the user's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.norm = nn.BatchNorm1d(6)
        self.last = Block()
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        before = x.dtype
        x = self.norm(x)
        self.seen = [before, x.dtype]
        return self.last(x)


@pytest.mark.trap(21)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("policy", ["classes", "function"])
@distributed(world_size=(2, 3))
def test_batch_norm_has_its_own_unit_in_full_precision(
    policy: str, use_orig_params: bool
) -> None:
    """Its parameters, inputs and statistics are fp32, its neighbours see bf16."""
    dtypes: list[torch.dtype] = []

    def is_block(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or isinstance(module, Block)

    words = "These modules will be wrapped as separate FSDP"
    with pytest.warns(UserWarning, match=words) as told:
        model = fsdp(
            _Normed(),
            auto_wrap_policy=(
                ModuleWrapPolicy({Block}) if policy == "classes" else is_block
            ),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
            use_orig_params=use_orig_params,
        )
    assert "norm (BatchNorm1d)" in str(told[-1].message)
    assert isinstance(model.norm, FSDP)
    assert len(FSDP.fsdp_modules(model)) == 4
    inner = model.norm.module
    handle = inner.register_forward_pre_hook(
        lambda module, args: dtypes.append(module.weight.dtype)
    )
    model(torch.randn(4, 6)).float().square().mean().backward()
    handle.remove()
    assert dtypes == [torch.float32]
    assert model.module.seen == [torch.bfloat16, torch.bfloat16]
    assert inner.running_mean.dtype == torch.float32
    state = full_state_dict(model)
    assert {t.dtype for t in state.values() if t.is_floating_point()} == {torch.float32}


@pytest.mark.trap(21)
@distributed(world_size=2)
def test_batch_norm_statistics_are_those_of_fp32() -> None:
    """A constant that bf16 cannot hold comes through the norm's statistics."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Identity(), nn.BatchNorm1d(6))
    model = fsdp(
        module,
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16, cast_root_forward_inputs=False
        ),
        units={nn.Identity},
        use_orig_params=True,
    )
    x = torch.randn(8, 6) + 1.0 / 3.0
    expected = nn.BatchNorm1d(6)
    out = model(x)
    assert_same_tensors("output", {"out": out}, {"out": expected(x)}, 1e-5)
    assert_same_tensors(
        "statistics",
        {"mean": full_state_dict(model)["1.running_mean"]},
        {"mean": expected.running_mean},
        1e-6,
    )


@pytest.mark.trap(22)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("mode", ["sync", "no_sync", "outside"])
@distributed(world_size=(2, 3))
def test_dtype_of_gradients(
    mode: str, strategy: str, keeps: bool, use_orig_params: bool
) -> None:
    """fp32 as the parameters, or bf16 on request; fresh, accumulated and cleared."""
    dtype = torch.bfloat16 if keeps else torch.float32
    torch.manual_seed(0)
    reference = Block()
    model = fsdp(
        copy.deepcopy(reference),
        strategy=strategy,
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16, keep_low_precision_grads=keeps
        ),
        use_orig_params=use_orig_params,
    )
    x = torch.randn(4, 6)
    for num_backwards in (2, 1, 3):
        for index in range(num_backwards):
            keeps_sync = mode != "no_sync" or index == num_backwards - 1
            if mode == "sync":
                model.zero_grad(set_to_none=index > 0)
            with contextlib.nullcontext() if keeps_sync else model.no_sync():
                model(x).float().square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert grads
        assert {grad.dtype for grad in grads} == {dtype}
        for param in model.parameters():
            assert param.dtype == torch.float32
            param.grad = None
    model(x).float().square().mean().backward()
    reference(x).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    norm = model.clip_grad_norm_(0.1)
    assert norm.item() == pytest.approx(expected.item(), rel=0.05)


@pytest.mark.trap(22)
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_gradient_of_the_parameters_dtype_may_be_assigned(
    world_size: int, use_orig_params: bool
) -> None:
    """Before and after a backward in bf16; the next one adds to it."""
    model = fsdp(
        nn.Linear(6, 6, bias=False),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
        use_orig_params=use_orig_params,
    )
    (param,) = model.parameters()
    for _ in range(2):
        param.grad = torch.full_like(param, 100.0)
        model(torch.zeros(2, 6)).float().sum().backward()
        assert param.grad.dtype == torch.float32
        assert param.grad[: 36 // world_size].eq(100.0).all()
