"""Mixed precision of buffers: cast for compute, whole in state dicts."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import TEST_DEVICE, distributed
from helpers.impl import FSDP, MixedPrecision, fsdp
from helpers.reference import Differential, full_state_dict


class Shift(nn.Module):
    """A linear layer and buffers of every kind; notes their dtypes in forward."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        # Values that bf16 holds exactly.
        self.register_buffer("shift", torch.arange(dim) / 4)
        self.register_buffer("hidden", torch.ones(dim), persistent=False)
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("none", None)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        assert self.count.dtype == torch.int64
        assert self.hidden.dtype == self.shift.dtype
        self.seen.append(self.shift.dtype)
        out: Tensor = self.linear(x) * self.hidden.to(x.dtype)
        return torch.tanh(out + self.shift.to(x.dtype))


class Net(nn.Module):
    """Two of them, the second one to be a unit of its own or to be ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Shift()
        self.second = Shift()
        self.gain = nn.Parameter(torch.ones(6))
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.to(x.dtype)
        return self.second(self.first(x)) * self.gain * scale


BF16 = MixedPrecision(buffer_dtype=torch.bfloat16)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@distributed(world_size=(2, 3))
def test_training(param_dtype: torch.dtype | None, use_orig_params: bool) -> None:
    """Buffers in bf16 in forward, in their own dtypes in the state dict."""
    differential = Differential.of_units(
        Net,
        {Shift},
        mixed_precision=MixedPrecision(
            param_dtype=param_dtype, buffer_dtype=torch.bfloat16
        ),
        use_orig_params=use_orig_params,
    )
    differential.train(2)
    net = differential.model.module
    assert set(net.first.module.seen + net.second.module.seen) == {torch.bfloat16}
    assert net.scale.dtype == torch.bfloat16
    state = full_state_dict(differential.model)
    expected = differential.reference.state_dict()
    assert list(state) == list(expected)
    for name, buffer in differential.reference.named_buffers():
        if name in expected:
            assert state[name].dtype == buffer.dtype, name
            assert torch.equal(state[name], buffer), name
    # Not the state dict's doing: they are still cast.
    assert net.scale.dtype == torch.bfloat16


@distributed(world_size=2)
def test_a_unit_follows_its_own_setting() -> None:
    """Units inside and outside, and an ignored module."""
    net = Net()
    net.second = fsdp(
        net.second, mixed_precision=MixedPrecision(buffer_dtype=torch.float16)
    )
    model = fsdp(net, mixed_precision=BF16)
    model(torch.randn(4, 6)).sum().backward()
    assert net.first.seen == [torch.bfloat16]
    assert net.second.module.seen == [torch.float16]

    net = Net()
    model = fsdp(net, ignored_modules=[net.second], mixed_precision=BF16)
    model(torch.randn(4, 6)).sum().backward()
    assert net.first.seen == [torch.bfloat16]
    assert net.second.seen == [torch.float32]
    state = full_state_dict(model)
    assert state["second.shift"].dtype == state["first.shift"].dtype == torch.float32


@distributed(world_size=2)
def test_wrapped_in_eval_mode() -> None:
    """The first forward of all is one in eval mode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        net = Net().eval()
        net.first.shift.fill_(0.1)
        model = fsdp(net, mixed_precision=BF16)
    model(torch.randn(4, 6))
    assert net.first.seen == [torch.float32]
    assert torch.equal(net.first.shift, torch.full((6,), 0.1))


@distributed(world_size=2)
def test_loading() -> None:
    """A state dict of the unwrapped model goes into cast buffers, and back."""
    source = Net()
    source.first.shift.add_(1.0)
    source.scale.fill_(3.0)
    model = fsdp(Net(), mixed_precision=BF16)
    model(torch.randn(4, 6))
    model.load_state_dict(source.state_dict())
    assert model.module.first.shift.dtype == torch.bfloat16
    state = full_state_dict(model)
    for name in ("first.shift", "scale", "second.count"):
        assert torch.equal(state[name], source.state_dict()[name]), name


@distributed(world_size=2)
def test_synced_states(rank: int) -> None:
    """Rank 0's buffers reach all ranks in their own dtype, then are cast."""
    net = Net()
    with torch.no_grad():
        net.first.shift.add_(float(rank))
    model = fsdp(net, sync_module_states=True, mixed_precision=BF16)
    model(torch.randn(4, 6))
    state = full_state_dict(model)
    assert torch.equal(state["first.shift"], torch.arange(6) / 4)
    assert net.first.seen == [torch.bfloat16]


@distributed(world_size=2)
def test_meta_buffers() -> None:
    """Buffers that are made by param_init_fn are cast like others."""

    def init(module: nn.Module) -> None:
        module.to_empty(device=TEST_DEVICE, recurse=False)
        for name, buffer in module.named_buffers(recurse=False):
            buffer.fill_(3 if name == "count" else 1.5)
        for param in module.parameters(recurse=False):
            nn.init.ones_(param)

    with torch.device("meta"):
        net = Net()
    model = fsdp(net, param_init_fn=init, mixed_precision=BF16)
    model(torch.randn(4, 6))
    assert net.first.seen == [torch.bfloat16]
    state = full_state_dict(model)
    assert torch.equal(state["first.shift"], torch.full((6,), 1.5))
    assert state["first.shift"].dtype == torch.float32


@distributed(world_size=2)
def test_summoned_names_and_buffers() -> None:
    """A summon shows the buffers as they are, under clean names."""
    model = fsdp(Net(), mixed_precision=BF16)
    model(torch.randn(4, 6))
    with FSDP.summon_full_params(model):
        buffers = dict(model.named_buffers())
    assert buffers["first.shift"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.int32, "bfloat16"])
@distributed(world_size=2)
def test_bad_dtype(dtype: Any) -> None:
    """Only floating dtypes make sense."""
    with pytest.raises(ValueError, match="buffer_dtype"):
        fsdp(Net(), mixed_precision=MixedPrecision(buffer_dtype=dtype))
