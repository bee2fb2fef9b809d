"""copy.deepcopy of a wrapped module: shards of its own, and the same behaviour."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)

from fsdp_c import reset
from helpers.distributed import distributed, every_strategy, varied
from helpers.groups import hybrid_groups
from helpers.impl import FSDP, MixedPrecision, assert_idle, fsdp
from helpers.models import BATCH, CASES, DIM, Block, TiedBlock, vectors
from helpers.reference import Differential, assert_same, full_state_dict, with_model


def _copy(differential: Differential) -> Differential:
    """Return copies of both models, with optimizers of their own."""
    reference = copy.deepcopy(differential.reference)
    model = copy.deepcopy(differential.model)
    assert all(param.grad is None for param in model.parameters())
    reference.zero_grad()
    return Differential(
        lambda: reference,
        lambda _module: model,
        differential.inputs,
        use_orig_params=differential.use_orig_params,
        param_dtype=differential.param_dtype,
    )


def _check_copy(differential: Differential) -> None:
    """Copy, train one and then the other; both follow their references."""
    twin = _copy(differential)
    model, other = differential.model, twin.model
    assert [n for n, _ in model.named_parameters()] == [
        n for n, _ in other.named_parameters()
    ]
    _assert_nothing_shared(model, other)
    twin.check()
    values = [p.detach().clone() for p in model.parameters()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    twin.train(2)
    for param, value, grad in zip(model.parameters(), values, grads, strict=True):
        assert torch.equal(param, value)
        assert (param.grad is None) == (grad is None)
        assert grad is None or torch.equal(param.grad, grad)
    differential.check()
    differential.zero_grad()
    values = [p.detach().clone() for p in other.parameters()]
    differential.train(2)
    for param, value in zip(other.parameters(), values, strict=True):
        assert torch.equal(param, value)
    twin.train(1)
    twin.evaluate()
    assert_idle(model)
    assert_idle(other)


def _assert_nothing_shared(model: nn.Module, other: nn.Module) -> None:
    mine = {id(p) for p in (*model.parameters(), *model.buffers(), *model.modules())}
    theirs = {id(p) for p in (*other.parameters(), *other.buffers(), *other.modules())}
    assert not mine & theirs
    # Empty shards have no memory.
    mine = {p.untyped_storage().data_ptr() for p in model.parameters() if p.numel()}
    theirs = {p.untyped_storage().data_ptr() for p in other.parameters() if p.numel()}
    assert not mine & theirs


@every_strategy
@pytest.mark.parametrize("num_steps", [0, 2])
@distributed(world_size=(2, 3))
@with_model("uneven")
def test_copy_trains_alone(differential: Differential, num_steps: int) -> None:
    """Before the first step, and after some."""
    differential.train(num_steps)
    _check_copy(differential)


@pytest.mark.bookkeeping
@varied(model=["tied", "transformer", "scalar", "mixed_dtype"])
@distributed(world_size=4)
@with_model()
def test_other_models(differential: Differential) -> None:
    """Four ranks, and models whose parameters are special."""
    differential.train(1)
    _check_copy(differential)


@distributed(world_size=2)
@with_model("mlp")
def test_compiled_in_place(differential: Differential) -> None:
    """The copy runs itself, not what compile() made of the module that was copied."""
    for module in FSDP.fsdp_modules(differential.model):
        module.compile(backend="eager")
    differential.train(1)
    _check_copy(differential)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
@with_model("mlp")
def test_with_its_optimizer(differential: Differential, use_orig_params: bool) -> None:
    """Copied after the model, in one call: the copy steps the copied parameters.

    Before the model, flat parameters cannot be.
    """
    differential.train(2)
    differential.zero_grad()
    pair = (differential.model, differential.optimizer)
    differential.model, differential.optimizer = copy.deepcopy(pair)
    differential.train(2)
    refusal: Any = pytest.raises(RuntimeError, match="copy the module first")
    with contextlib.nullcontext() if use_orig_params else refusal:
        copy.deepcopy(pair[::-1])


@every_strategy
@distributed(world_size=2)
@with_model("mlp")
def test_data_that_was_replaced(differential: Differential) -> None:
    """By ``param.data = x``: the copy has the new values, and so has the model."""
    differential.train(1)
    for param in differential.model.parameters():
        param.data = 0.5 * param.data
    with torch.no_grad():
        for param in differential.reference.parameters():
            param.mul_(0.5)
    _check_copy(differential)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=4)
def test_replicas(use_orig_params: bool) -> None:
    """The copy uses the same groups."""
    with hybrid_groups(2, 2) as groups:

        def wrap(module: nn.Module) -> Any:
            return fsdp(
                module,
                process_group=groups,
                strategy="HYBRID_SHARD",
                units={Block},
                use_orig_params=use_orig_params,
            )

        differential = Differential(
            CASES["mlp"].build, wrap, vectors, use_orig_params=use_orig_params
        )
        differential.train(1)
        _check_copy(differential)
        del differential


@pytest.mark.trap(24)
@varied(use_orig_params=[True, False])
@distributed(world_size=2)
@with_model(CASES["tied"].build, {TiedBlock})
def test_shared_parameters_stay_shared(differential: Differential) -> None:
    """In the copy the two layers are one parameter again, another one."""
    differential.train(1)
    twin = _copy(differential)
    with (
        FSDP.summon_full_params(differential.model, writeback=False),
        FSDP.summon_full_params(twin.model, writeback=False),
    ):
        tied, other = (d.model.module.tied for d in (differential, twin))
        assert other.first.weight is other.second.weight
        assert other.first.weight is not tied.first.weight
        assert_same("weight", other.first.weight.detach(), tied.first.weight.detach())
    twin.train(2)


class Nested(nn.Module):
    """Units inside a unit, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Block(), Middle(), Block())
        self.out = nn.Linear(DIM, 2)
        self.register_buffer("scale", 0.5 + torch.arange(DIM) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x * self.scale.to(x.dtype)))


class Middle(nn.Module):
    """A unit with a unit and a buffer in it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.arange(DIM) / 4)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(self.block(x)) + self.shift.to(x.dtype)


@pytest.mark.trap(20)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("is_mixed", [False, True])
@distributed(world_size=2)
def test_nested_units_and_buffers(
    is_mixed: bool, num_steps: int, use_orig_params: bool
) -> None:
    """Buffers are copied; buffer_dtype holds for the copy, not for its state dict."""
    dtype = torch.bfloat16 if is_mixed else None
    differential = Differential.of_units(
        Nested,
        {Block, Middle},
        use_orig_params=use_orig_params,
        mixed_precision=MixedPrecision(dtype, dtype and torch.float32, dtype),
    )
    differential.train(num_steps)
    _check_copy(differential)
    twin = _copy(differential)
    counts = [
        {n: int(b) for n, b in m.named_buffers() if "count" in n}
        for m in (differential.model, twin.model)
    ]
    assert counts[0] == counts[1]
    twin.train(1)
    assert twin.model.module.scale.dtype == (dtype or torch.float32)
    for model in (twin.model, differential.model):
        state = full_state_dict(model)
        expected = twin.reference.state_dict()
        assert list(state) == list(expected)
        for name in ("scale", "inner.1.shift"):
            assert state[name].dtype == torch.float32
            assert torch.equal(state[name], expected[name])


@distributed(world_size=2)
@with_model()
def test_hooks_come_along(differential: Differential) -> None:
    """Forward hooks of wrapped and of inner modules run with the copy's modules."""
    seen: list[nn.Module] = []

    def note(module: nn.Module, *_: Any) -> None:
        seen.append(module)

    model = differential.model
    model.register_forward_hook(note)
    model.blocks[1].register_forward_pre_hook(note)
    model.module.inp.register_forward_hook(note)
    differential.train(1)
    assert seen == [model.module.inp, model.blocks[1], model]
    twin = _copy(differential)
    seen.clear()
    twin.train(1)
    other = twin.model
    assert seen == [other.module.inp, other.blocks[1], other]
    model.register_forward_hook(lambda *_: seen.clear())
    seen.clear()
    twin.train(1)
    assert len(seen) == 3, "a hook of the original runs for the copy"
    seen.clear()


@distributed(world_size=2)
@with_model(strategy="NO_SHARD")
def test_comm_hook_comes_along(differential: Differential, world_size: int) -> None:
    """What the copy says about its hook is what its backward does."""
    num_calls = [0]

    def reduce(state: Any, grad: Tensor) -> None:
        num_calls[0] += 1
        torch.distributed.all_reduce(grad)
        grad /= world_size

    differential.model.register_comm_hook(None, reduce)
    differential.train(1)
    twin = _copy(differential)
    before = num_calls[0]
    twin.train(1)
    assert num_calls[0] == before + 4
    with pytest.raises(AssertionError, match="already"):
        twin.model.register_comm_hook(None, reduce)


@distributed(world_size=2)
@with_model("frozen")
def test_settings_come_along(differential: Differential) -> None:
    """Modes, frozen parameters, an ignored module, subclasses of names."""
    twin = _copy(differential)
    twin.train(2)
    assert [p.requires_grad for p in twin.model.parameters()] == [
        p.requires_grad for p in differential.model.parameters()
    ]
    module = nn.Sequential(Block(), Block())
    model = fsdp(module, ignored_modules=[module[1]], use_orig_params=True)
    model.eval()
    other = copy.deepcopy(model)
    assert not other.training
    assert not other.module[0].training
    assert other.module[1].fc1.weight is not module[1].fc1.weight
    assert torch.equal(other.module[1].fc1.weight, module[1].fc1.weight)
    assert other.module[1].fc1.weight.shape == (10, DIM)
    x = torch.ones(BATCH, DIM)
    assert_same("output", other(x).detach(), model(x).detach(), 0.0)


@pytest.mark.trap(19)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("is_frozen", [True, False])
@distributed(world_size=2)
def test_frozen_since_wrapping(is_frozen: bool, use_orig_params: bool) -> None:
    """And thawed: the copy has what the parameters have now."""
    module = nn.Sequential(Block(), Block())
    module[0].requires_grad_(is_frozen)  # at wrapping the contrary
    model = fsdp(module, units={Block}, use_orig_params=use_orig_params)
    for param in model.module[0].parameters():
        param.requires_grad_(not is_frozen)
    expected = [param.requires_grad for param in model.parameters()]
    other = copy.deepcopy(model)
    assert [param.requires_grad for param in other.parameters()] == expected
    other(torch.ones(BATCH, DIM)).sum().backward()
    if not use_orig_params:
        assert [param.grad is not None for param in other.parameters()] == expected


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_plain_module_around_units(use_orig_params: bool) -> None:
    """The wrapped modules are children of what is copied."""

    def wrap(module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Sequential)
        return nn.Sequential(
            *(fsdp(each, use_orig_params=use_orig_params) for each in module)
        )

    reference = nn.Sequential(Block(), Block())
    model = wrap(copy.deepcopy(reference))
    other = copy.deepcopy(model)
    x = torch.randn(BATCH, DIM)
    assert_same("output", other(x).detach(), reference(x).detach())
    other(x).sum().backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    assert_same("output", model(x).detach(), reference(x).detach())
    assert not torch.equal(other(x), model(x))


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_module_taken_out_since_wrapping(use_orig_params: bool) -> None:
    """Its parameters are the unit's, but nobody's child has them."""
    module = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))
    model = fsdp(module, use_orig_params=use_orig_params)
    module[1] = nn.Identity()
    other = copy.deepcopy(model)
    x = torch.randn(BATCH, DIM)
    outputs = []
    for each in (model, other):
        each(x).sum().backward()
        torch.optim.SGD(each.parameters(), 0.1).step()
        outputs.append(each(x).detach())
    assert_same("output", outputs[1], outputs[0], 0.0)
    assert full_state_dict(other).keys() == full_state_dict(model).keys()


class _Copies(nn.Module):
    """Copies a wrapped module in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.target: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        for each in self.target:
            copy.deepcopy(each)
        return self.block(x)


@varied(use_orig_params=[True, False])
@pytest.mark.parametrize("which", ["root", "unit"])
@distributed(world_size=2)
@with_model(_Copies, {Block})
def test_inside_forward(differential: Differential, rank: int, which: str) -> None:
    """Refused: parameters are whole there. Training goes on after reset()."""
    model = differential.model
    differential.train(1)
    differential.zero_grad()
    (batch,) = differential.batches()[rank]
    model.module.target.append(model if which == "root" else model.module.block)
    with pytest.raises(RuntimeError, match="copied"):
        model(batch)
    model.module.target.clear()
    reset(model)
    differential.train(2)


@distributed(world_size=2)
@with_model()
def test_inside_a_summon(differential: Differential) -> None:
    """Refused as well; the summon stays open."""
    with FSDP.summon_full_params(differential.model):
        with pytest.raises(RuntimeError, match="copied"):
            copy.deepcopy(differential.model)
        assert [p.shape for p in differential.model.parameters()] == [
            p.shape for p in differential.reference.parameters()
        ]
    differential.train(1)


class _Forwards(nn.Module):
    """Looks missing attributes up in the module inside, as many wrappers do."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inside, name)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.inside(x)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_wrappers_that_look_attributes_up_inside(use_orig_params: bool) -> None:
    """They are copied too, around the model and around a unit."""
    unit = fsdp(Block(), use_orig_params=use_orig_params)
    model = fsdp(
        nn.Sequential(checkpoint_wrapper(unit)), use_orig_params=use_orig_params
    )
    wrapped = _Forwards(model)
    x = torch.randn(2, DIM)
    other = copy.deepcopy(wrapped)
    assert [name for name, _ in other.named_modules()] == [
        name for name, _ in wrapped.named_modules()
    ]
    assert isinstance(other, _Forwards)
    assert isinstance(other.inside.module[0], CheckpointWrapper)
    assert other.inside is not wrapped.inside
    torch.testing.assert_close(other(x), wrapped(x))
