"""Units that mix frozen and trainable parameters, dtypes and quantised weights."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.distributed import STRATEGIES, distributed, every_strategy, varied
from helpers.impl import FSDP, MixedPrecision, assert_idle, fsdp, memory_stats
from helpers.models import DIM, Block, loss_of
from helpers.reference import (
    Differential,
    assert_same_tensors,
    clean_name,
    full_state_dict,
    with_model,
)
from helpers.rows import in_either_api

RANKS = (2, 3, 4)


class _Quantised(nn.Module):
    """A linear layer of uint8 codes and their scales; the scales may train."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (DIM, DIM), dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(DIM, 1) / 128.0)
        self.zero = nn.Parameter(torch.tensor(128.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.codes.dtype == torch.uint8
        weight = (self.codes.to(x.dtype) - self.zero.to(x.dtype)) * self.scale
        return F.linear(x, weight)


class _Adapted(nn.Module):
    """A frozen layer and a trainable low-rank adapter beside it: LoRA."""

    def __init__(self, base: nn.Module | None = None) -> None:
        super().__init__()
        self.base = base or nn.Linear(DIM, DIM)
        self.base.requires_grad_(False)
        self.lora_a = nn.Linear(DIM, 2, bias=False)
        self.lora_b = nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


class _Everything(nn.Module):
    """fp32, bf16, fp64 and uint8, frozen and trainable, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.quantised = _Adapted(_Quantised())
        self.low = nn.Linear(DIM, DIM).to(torch.bfloat16)
        self.low_frozen = nn.Linear(DIM, DIM).to(torch.bfloat16).requires_grad_(False)
        self.high = nn.Linear(DIM, DIM).double()
        self.high.bias.requires_grad_(False)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.quantised(x)) * self.gate
        low = self.low_frozen(torch.tanh(self.low(x.to(torch.bfloat16))))
        return x + self.high(low.double()).to(x.dtype)


class _Stack(nn.Module):
    """Layers of one kind, in a row."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _trainable_nbytes(model: nn.Module, world_size: int) -> int:
    """Return the least bytes that the trainable parameters' gradients can take."""
    nbytes = sum(
        p.numel() * p.element_size() for p in model.parameters() if p.requires_grad
    )
    return nbytes // world_size


def _check_gradient_memory(differential: Differential, *, num_units: int = 1) -> None:
    """Fail if frozen parameters have gradient memory; padding is allowed for."""
    ranks = differential.world_size
    if differential.model.sharding_strategy.name == "NO_SHARD":
        ranks = 1
    least = _trainable_nbytes(differential.reference, ranks)
    nbytes = memory_stats(differential.model)["grad_shard_nbytes"]
    # Each parameter begins at a multiple of 16 bytes of the smallest dtype, and
    # each segment is padded to whole such steps: at most 128 bytes of fp64.
    num_trainable = sum(p.requires_grad for p in differential.reference.parameters())
    most = least + 128 * (num_trainable + 4 * num_units)
    assert least <= nbytes <= most, f"{least} <= {nbytes} <= {most}"
    for param in differential.model.parameters():
        assert param.requires_grad or param.grad is None


@pytest.mark.trap(2)
@every_strategy
@distributed(world_size=RANKS)
def test_everything_in_one_unit(strategy: str, use_orig_params: bool) -> None:
    """Four dtypes, frozen and trainable; alone and with a nested unit of them."""
    for build, units in (
        (_Everything, ()),
        (lambda: _Stack([_Everything(), _Everything()]), {_Everything}),
    ):
        differential = Differential.of_units(
            build,
            units,
            strategy=strategy,
            use_orig_params=use_orig_params,
            tolerance=4e-2,
        )
        before = {n: t.clone() for n, t in full_state_dict(differential.model).items()}
        differential.train(3)
        _check_gradient_memory(differential, num_units=len(units) * 2 or 1)
        state = full_state_dict(differential.model)
        for name, param in differential.reference.named_parameters():
            assert state[name].dtype == param.dtype
            if not param.requires_grad:
                assert torch.equal(state[name], before[name]), name


@every_strategy
@distributed(world_size=RANKS)
@with_model(
    lambda: _Stack(_Adapted(_Quantised()) for _ in range(2)),
    {_Adapted},
    tolerance=4e-2,
    mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
)
def test_quantised_weights_under_mixed_precision(differential: Differential) -> None:
    """Integers keep their dtype, floating parameters compute in bf16."""
    differential.train(2)
    _check_gradient_memory(differential, num_units=3)


@every_strategy
@pytest.mark.parametrize("units", ["one", "adapters inside"])
@distributed(world_size=RANKS)
def test_adapters_without_units_of_their_own(
    units: str, strategy: str, use_orig_params: bool
) -> None:
    """LoRA: accumulation, clipping and evaluation, with the base frozen."""
    differential = Differential.of_units(
        lambda: _Stack(_Adapted() for _ in range(3)),
        {_Adapted} if units == "adapters inside" else (),
        strategy=strategy,
        use_orig_params=use_orig_params,
    )
    differential.train(2)
    differential.run("znns")
    differential.clip(0.01)
    differential.checked_step()
    differential.evaluate()
    differential.train(1)
    _check_gradient_memory(differential, num_units=4)


def _toggle(differential: Differential, names: Iterable[str], value: bool) -> None:
    """Set requires_grad of whole modules in both models."""
    for name in names:
        for model in (differential.reference, differential.model):
            model.get_submodule(_path(model, name)).requires_grad_(value)


def _path(model: nn.Module, name: str) -> str:
    """Return the name of the module ``name`` with the names of wrappers in it."""
    return next(
        n for n, _ in model.named_modules() if clean_name(n + ".") == name + "."
    )


@pytest.mark.trap(19)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("at_wrapping", ["trainable", "frozen"])
@pytest.mark.parametrize("unit", ["whole", "part"])
@distributed(world_size=RANKS)
def test_requires_grad_is_toggled_between_steps(
    unit: str, at_wrapping: str, strategy: str
) -> None:
    """Both directions, with optimizer state built, for a unit and for a part."""
    names = ["layers.1"] if unit == "whole" else ["layers.1.fc1", "layers.2.fc2"]

    def build() -> nn.Module:
        model = _Stack(Block() for _ in range(3))
        if at_wrapping == "frozen":
            for name in names:
                model.get_submodule(name).requires_grad_(False)
        return model

    differential = Differential.of_units(build, {Block}, strategy=strategy)
    is_trainable = at_wrapping == "trainable"
    differential.train(1)
    for _ in range(4):
        is_trainable = not is_trainable
        _toggle(differential, names, is_trainable)
        differential.zero_grad()
        differential.train(1)
        differential.run("znsu")
        for name, param in differential.model.named_parameters():
            if any(clean_name(name).startswith(prefix) for prefix in names):
                assert param.requires_grad == is_trainable
                if not is_trainable:
                    assert param.grad is None or not param.grad.any(), name


@pytest.mark.trap(19)
@distributed(world_size=RANKS)
@with_model()
def test_everything_is_frozen_for_a_while(
    differential: Differential, rank: int
) -> None:
    """No parameter requires grad: forward and the input's gradient still work."""
    differential.train(1)
    both: tuple[Any, ...] = (differential.model, differential.reference)
    for model in both:
        model.requires_grad_(False)
    differential.zero_grad()
    before = full_state_dict(differential.model)
    (batch,) = differential.batches()[rank]
    gradients = []
    for model in both:
        x = batch.clone().requires_grad_()
        loss_of(model(x)).backward()
        assert x.grad is not None
        gradients.append({"x": x.grad})
    assert_same_tensors("input gradient", *gradients)
    assert not differential.model(batch).requires_grad
    assert_idle(differential.model)
    assert_same_tensors("state", full_state_dict(differential.model), before, 0.0)
    for model in both:
        model.requires_grad_(True)
    differential.train(2)


@varied(use_orig_params=[True, False])
@distributed(world_size=RANKS)
@with_model(lambda: _Stack(_Adapted() for _ in range(2)), {_Adapted})
def test_writes_to_frozen_parameters_are_seen(differential: Differential) -> None:
    """Merging an adapter into its frozen base, inside a summon."""
    differential.train(1)
    both: tuple[Any, ...] = (differential.model, differential.reference)
    with FSDP.summon_full_params(differential.model), torch.no_grad():
        for model in both:
            for layer in model.layers:
                layer.base.weight.add_(layer.lora_b.weight @ layer.lora_a.weight)
                layer.lora_b.weight.zero_()
    differential.zero_grad()
    differential.check()
    differential.train(2)


class _SkipBlock(nn.Module):
    """A block whose second layer runs only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(DIM, DIM)
        self.fc2 = nn.Linear(DIM, DIM)
        self.uses_both = True

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.fc1(x))
        return x + self.fc2(x) if self.uses_both else x


@varied(use_orig_params=[True, False])
@distributed(world_size=(2, 3))
@with_model(
    lambda: nn.Sequential(*(_SkipBlock() for _ in range(4))),
    {_SkipBlock},
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
)
def test_layers_unused_from_some_step_on(differential: Differential, rank: int) -> None:
    """Units give their parameters back in backward, also in the first such step."""
    held: list[int] = []

    def look(grad: Tensor) -> None:
        held.append(memory_stats(differential.model)["held_nbytes"])

    for uses_both in (True, True, False, False, True, False):
        for model in (differential.reference, differential.model.module):
            for block in model.modules():
                if isinstance(block, _SkipBlock):
                    block.uses_both = uses_both
        differential.zero_grad()
        batches = differential.batches()
        loss, _ = differential.reference_forward(batches)
        loss.backward()
        x = batches[rank][0].clone().requires_grad_()
        x.register_hook(look)
        loss_of(differential.model(x)).backward()
        assert_idle(differential.model)
        differential.checked_step()
    assert set(held) == {held[0]}


class _Recomputed(nn.Module):
    """Its block runs without gradients in forward, and again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.block = Block()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, self.first(x), use_reentrant=True)


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=2)
def test_thawed_inside_reentrant_checkpointing(api: str) -> None:
    """A forward without gradients follows requires_grad: it may be checkpointing's."""
    differential = in_either_api(api, _Recomputed, {Block}, strategy=None)
    for is_trainable in (False, True):
        for model in (differential.reference, differential.model):
            for name, param in model.named_parameters():
                param.requires_grad = is_trainable or "block" not in name
        differential.run("znnsu znnsu")


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=2)
def test_a_summon_shows_what_is_frozen(strategy: str) -> None:
    """Set on the flat parameter after wrapping, shown before the next forward.

    A forward without gradients does not look: it must not be needed.
    """
    model = fsdp(Block(), strategy=strategy)
    for is_trainable in (False, True, False):
        for param in model.parameters():
            param.requires_grad = is_trainable
        with torch.no_grad():
            model(torch.ones(2, DIM))
        with FSDP.summon_full_params(model):
            for name, param in model.named_parameters():
                assert param.requires_grad is is_trainable, name
        assert all(p.requires_grad is is_trainable for p in model.parameters())


@distributed(world_size=2)
def test_unfrozen_while_gradients_are_held() -> None:
    """The core states the fault, the bridge what the user can do about it."""
    model = fsdp(_Adapted(), use_orig_params=True)
    with model.no_sync():
        model(torch.ones(2, DIM)).sum().backward()
    model.base.requires_grad_(True)
    expected = (
        "parameters of unit '_Adapted' were unfrozen in the middle of a gradient "
        "accumulation; set requires_grad between optimizer steps"
    )
    with pytest.raises(RuntimeError, match=f"^{expected}$"):
        model(torch.ones(2, DIM))
