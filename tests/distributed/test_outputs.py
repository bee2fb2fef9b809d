"""Outputs of every kind, of a nested unit and of the root."""

import copy
import dataclasses
import gc
import io
import warnings
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import distributed, every_strategy
from helpers.impl import FSDP, fsdp
from helpers.models import OUTPUT_KINDS, Outputs, PackedBlock, Pair, Result, tensors_of
from helpers.reference import Differential
from helpers.seeds import seeded


class OneLayer(nn.Module):
    """A layer, for what a test makes of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)


@pytest.mark.trap(4)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("kind", OUTPUT_KINDS)
@distributed(world_size=(2, 3))
def test_training(kind: str, strategy: str, use_orig_params: bool) -> None:
    """Backward starts from each of the tensors in the container."""
    differential = Differential.of_units(
        lambda: Outputs(kind),
        {PackedBlock},
        strategy=strategy,
        use_orig_params=use_orig_params,
    )
    differential.train(3)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "namedtuple"])
@distributed(world_size=2)
def test_only_one_output_is_used(kind: str, index: int) -> None:
    """The loss depends on one of two outputs."""

    def loss(model: nn.Module, *batch: Tensor) -> Tensor:
        return tensors_of(model(*batch))[index].square().mean()

    Differential.of_units(lambda: Outputs(kind), {PackedBlock}).train_on(loss, 2)


@distributed(world_size=2)
def test_types_are_kept() -> None:
    """The caller gets the object that the module made, or an equal one."""

    class Net(OneLayer):
        def forward(self, x: Tensor) -> Any:
            y = self.fc(x)
            return OrderedDict(
                pair=Pair(y, y * 2),
                result=Result(y, y + 1, "label"),
                other=[None, "text", 3, {"t": (y,)}],
            )

    out = fsdp(Net(), use_orig_params=True)(torch.randn(4, 6))
    assert type(out) is OrderedDict
    assert list(out) == ["pair", "result", "other"]
    assert type(out["pair"]) is Pair
    assert type(out["result"]) is Result
    assert out["result"].label == "label"
    assert out["other"][:3] == [None, "text", 3]
    assert type(out["other"][3]["t"]) is tuple
    assert all(t.requires_grad for t in tensors_of(out))


@distributed(world_size=2)
def test_outputs_without_gradients() -> None:
    """Integer and detached outputs, and no output at all, are left alone."""

    class Net(OneLayer):
        def forward(self, x: Tensor, *, nothing: bool = False) -> Any:
            y = self.fc(x)
            return None if nothing else (y, y.detach(), y.argmax(dim=1))

    model = fsdp(Net(), use_orig_params=True)
    assert model(torch.randn(4, 6), nothing=True) is None
    y, detached, index = model(torch.randn(4, 6))
    assert y.requires_grad
    assert not detached.requires_grad
    assert index.dtype == torch.int64
    y.sum().backward()


@distributed(world_size=2)
def test_backward_past_the_outputs() -> None:
    """A penalty on the whole parameters that forward has left shown."""

    class Net(OneLayer):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.fc(x))

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        return torch.stack([p.square().sum() for p in model.parameters()]).sum()

    Differential.of_units(Net, (), strategy="SHARD_GRAD_OP").train_on(penalty, 2)


@distributed(world_size=2)
def test_same_tensor_twice_and_input_returned() -> None:
    """One tensor in two places; the input itself among the outputs."""

    class Block(OneLayer):
        def forward(self, x: Tensor) -> Any:
            y = self.fc(x)
            return y, y, x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Any:
            a, b, same = self.blocks[0](x)
            c, d, passed = self.blocks[1](a + b + same)
            return c * d + passed

    differential = Differential.of_units(Net, {Block})
    differential.train(3)


@pytest.mark.trap(4)
@distributed(world_size=2)
def test_output_changed_in_place() -> None:
    """An in-place operation on a unit's output that is a view (pytorch#181832)."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 12)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(x)
            return out[:, :6]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                x.mul_(2.0)
                x.relu_()
            return x

    differential = Differential.of_units(Net, {Block})
    differential.train(3)


@distributed(world_size=2)
def test_frozen_dataclass() -> None:
    """A dataclass that cannot be assigned to."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.out = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Any:
            return self.out(self.inner(x).value)

    class Inner(OneLayer):
        def forward(self, x: Tensor) -> Any:
            return _Fixed(self.fc(x))

    differential = Differential.of_units(Net, {Inner})
    differential.train(2)


@dataclasses.dataclass(frozen=True)
class _Fixed:
    value: Tensor


@distributed(world_size=2)
def test_backward_hooks_lists_the_native_hook() -> None:
    """`output._backward_hooks` has one entry, before backward and after it."""
    model = fsdp(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    for _ in range(2):
        output = model(x)
        assert len(output._backward_hooks) == 1
        output.sum().backward()
        assert len(output._backward_hooks) == 1
    leaf = torch.ones(2, 4, requires_grad=True)
    for passed in fsdp(nn.Identity())((leaf, leaf)):
        assert len(passed._backward_hooks) == 1
    with torch.no_grad():
        assert model(x)._backward_hooks is None


@distributed(world_size=2)
def test_users_hooks_on_an_output() -> None:
    """They run in their order, may change the gradient, and can be removed."""
    reference = nn.Linear(4, 4)
    model = fsdp(copy.deepcopy(reference), use_orig_params=True)
    x = torch.randn(2, 4, generator=seeded(0))
    for module in (reference, model):
        seen: list[str] = []
        output = module(x)
        output.register_hook(lambda grad, seen=seen: seen.append("first"))
        removed = output.register_hook(lambda grad, seen=seen: seen.append("no"))
        output.register_hook(lambda grad: grad * 3)
        removed.remove()
        output.register_hook(lambda grad, seen=seen: seen.append(str(grad.max())))
        (output * 2).sum().backward()
        assert seen == ["first", str(torch.tensor(6.0))]
    with FSDP.summon_full_params(model, with_grads=True):
        for mine, expected in zip(
            model.parameters(), reference.parameters(), strict=True
        ):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, expected.grad)


@distributed(world_size=2)
def test_an_output_with_a_hook_is_freed_and_saved() -> None:
    """The listing makes no cycle, and saving does not warn of it."""
    model = fsdp(nn.Linear(4, 4))
    output = model(torch.randn(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(output, io.BytesIO())
    hooks = weakref.ref(output._backward_hooks)
    gc.disable()
    try:
        del output
        assert hooks() is None
    finally:
        gc.enable()


class _GivesParams(nn.Module):
    """A block whose outputs are its own parameters, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"own": [self.weight, self.frozen], "sum": (x * self.weight).sum()}


class _PassesThemOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = _GivesParams()
        self.gain = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.block(x)
        weight, frozen = outputs["own"]
        return (weight * 2).sum() + outputs["sum"] + frozen.sum(), self.gain


@every_strategy
@distributed(world_size=2)
def test_parameters_as_outputs(strategy: str, use_orig_params: bool) -> None:
    """They stay whole after forward, and their gradients arrive."""
    both = Differential.of_units(
        _PassesThemOn,
        {_GivesParams},
        lambda generator: (torch.randn(3, generator=generator),),
        strategy=strategy,
        use_orig_params=use_orig_params,
    )

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total, gain = model(x)
        assert torch.equal(gain, both.reference.gain)
        result: Tensor = total + 3 * gain.sum()
        return result

    for _ in range(2):
        both.backward_of(loss)
        both.check()
    with torch.no_grad():
        loss(both.model, torch.ones(3))
