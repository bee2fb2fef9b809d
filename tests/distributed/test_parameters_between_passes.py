"""Parameters between forward and backward: whole with SHARD_GRAD_OP, as in FSDP1.

A use of them there, such as a penalty on weights, is of whole parameters, and its
gradient counts. What the user writes there is not lost.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers.distributed import STRATEGIES, distributed, varied
from helpers.groups import hybrid_groups
from helpers.impl import (
    FSDP,
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    assert_idle,
)
from helpers.models import DIM, MLP, Block
from helpers.reference import Differential, assert_same, clean_name
from helpers.rows import APIS, in_either_api
from helpers.seeds import seeded
from helpers.transports import OWN, over

CHANGED = "FSDP does not support changing the parameters between forward and backward"
KEEPING = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")


def _make(units: Any = (Block,), **options: Any) -> Differential:
    options = {"api": "FSDP", "strategy": "SHARD_GRAD_OP", **options}
    return in_either_api(build=lambda: MLP(2), units=units, **options)


def _batch() -> Tensor:
    return torch.ones(4, DIM, dtype=torch.float64)


def _penalty(model: nn.Module) -> Tensor:
    """Of every parameter, and not linear: a part of it gives another number."""
    terms = [param.square().sum().sqrt() for param in model.parameters()]
    return 0.1 * torch.stack(terms).sum()


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + _penalty(model)


def _shapes(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(param.shape) for param in model.parameters()]


def _train(both: Differential) -> None:
    """Run micro-steps: b backward, n one within no_sync, z zero_grad, s step."""
    for action in "bszbbsznnbsznzbs":
        if action == "s":
            both.step()
        elif action == "z":
            both.zero_grad()
        else:
            with both.no_sync(action == "n"):
                both.backward_of(_loss)
        if action != "n":
            both.check()
    assert_idle(both.model)


@varied(
    units=[{Block}, ()],
    transport=[OWN, "c10d"],
    prefetch=[BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None],
)
@distributed(world_size=(2, 3))
def test_penalty_on_weights(
    units: Any, transport: str, prefetch: BackwardPrefetch | None
) -> None:
    """Loss, gradients and parameters are the unsharded model's, in fp64."""
    with over(transport):
        both = _make(units, backward_prefetch=prefetch, forward_prefetch=bool(prefetch))
        _train(both)
        del both


@varied(strategy=["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"], offloads=[False, True])
@distributed(world_size=4)
def test_hybrid_and_offload(strategy: str, offloads: bool) -> None:
    """Only the second one is whole after forward."""
    with hybrid_groups(2, 2) as groups:
        both = _make(
            strategy=strategy, process_group=groups, cpu_offload=CPUOffload(offloads)
        )
        loss = both.model(_batch()).sum()
        is_whole = _shapes(both.model) == _shapes(both.reference)
        assert is_whole == (strategy in KEEPING)
        loss.backward()
        both.zero_grad()
        if strategy in KEEPING:
            _train(both)
        assert_idle(both.model)
        del both, loss


@distributed(world_size=2)
def test_offload() -> None:
    """Penalty and step, with shards in host memory."""
    _train(_make(cpu_offload=CPUOffload(True)))


@pytest.mark.cpu_only("on accelerators fsdp_c aligns parameters in a flat one")
@distributed(world_size=2)
def test_same_as_torch() -> None:
    """Shapes, dtypes, loss and gradients with a penalty; fp64 and bf16."""
    for mixed in (None, MixedPrecision(param_dtype=torch.bfloat16)):
        seen = []
        for wrap in (FSDP, TorchFSDP):
            torch.manual_seed(5)
            model: Any = wrap(
                MLP(2),
                sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                mixed_precision=mixed,
                use_orig_params=True,
                device_id=torch.device("cpu"),
            )
            x = torch.randn(4, DIM, generator=seeded(0))
            out = model(x).float().square().mean()
            params = [(p.shape, p.dtype) for p in model.parameters()]
            loss = out + _penalty(model).float()
            loss.backward()
            grads = {
                clean_name(name): param.grad.clone()
                for name, param in model.named_parameters()
                if param.grad is not None
            }
            seen.append((params, loss.detach(), grads, _shapes(model)))
        mine, expected = seen
        tolerance = 1e-5 if mixed is None else 2e-2
        assert mine[0] == expected[0]
        assert mine[3] == expected[3]  # of the shards again
        assert_same("loss", mine[1], expected[1], tolerance)
        assert mine[2].keys() == expected[2].keys()
        for name, grad in expected[2].items():
            assert_same(f"gradient of {name}", mine[2][name], grad, tolerance)


# Graphs that reach parameters first ---------------------------------------------


class _Product(torch.autograd.Function):
    """``x @ weight.T``, whose backward takes the weight as it is then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].T @ x


class _Part(nn.Module):
    def __init__(self, *, trains_head: bool) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 3, bias=False)
        self.head.weight.requires_grad_(trains_head)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x).tanh()
        return hidden


class _ReadsHead(nn.Module):
    """Reads the weight of a head that it does not call, as TRL's losses do."""

    def __init__(self, *, trains_head: bool) -> None:
        super().__init__()
        self.part = _Part(trains_head=trains_head)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.part(x)
        out: Tensor = _Product.apply(hidden, self.part.head.weight)  # type: ignore[no-untyped-call]
        return out


@varied(trains_head=[True, False], api=APIS)
@distributed(world_size=2)
def test_a_forward_without_gradients_in_between(trains_head: bool, api: str) -> None:
    """What an earlier forward kept is whole in the earlier graph's backward."""
    both = in_either_api(
        api,
        lambda: _ReadsHead(trains_head=trains_head),
        {_Part},
        strategy="SHARD_GRAD_OP",
    )
    for _ in range(2):
        both.forward_backward(inside=both.evaluate)
        both.check()


# What is shown ----------------------------------------------------------------


def _readable_shape(weight: Tensor) -> tuple[int, ...]:
    """Behind a flat parameter one without memory has its whole shape, too."""
    try:
        weight.detach().sum()
    except RuntimeError:
        return ()
    return tuple(weight.shape)


@varied(strategy=STRATEGIES, api=["FSDP", "FSDP flat"])
@distributed(world_size=2)
def test_what_is_shown(strategy: str, api: str) -> None:
    """Whole from the end of a forward that records to the unit's backward."""
    model = _make(api=api, strategy=strategy).model
    root, block = model.module, model.module.blocks[1].module
    weights = {"root": lambda: root.out.weight, "block": lambda: block.fc1.weight}
    whole = {"root": (3, DIM), "block": (10, DIM)}

    def look() -> dict[str, tuple[int, ...]]:
        return {name: _readable_shape(get()) for name, get in weights.items()}

    model(_batch()).sum().backward()
    sharded = look()
    assert (sharded == whole) == (strategy == "NO_SHARD")
    shown = whole if strategy == "SHARD_GRAD_OP" else sharded

    with torch.no_grad():
        model(_batch())
    assert look() == sharded
    loss = model(_batch()).sum()
    assert look() == shown
    model.eval()
    assert look() == shown
    with torch.no_grad():
        model(_batch())
    assert look() == sharded
    model.train()
    loss.backward()
    assert look() == sharded
    with model.no_sync():
        loss = model(_batch()).sum()
        assert look() == shown
        loss.backward()
    assert look() == sharded
    model(_batch()).sum()
    assert look() == shown


class _ReadsShape(nn.Module):
    """Reads a shape before it calls the module that has it, as peft's DoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(DIM, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.fc.weight
        eye = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        product: Tensor = x @ self.fc(eye)
        return product


@distributed(world_size=2)
def test_shapes_behind_flat_parameters() -> None:
    """Between steps the whole ones, as FSDP1's, and nothing to read."""
    differential = in_either_api("FSDP flat", _ReadsShape, {nn.Linear})
    weight = differential.model.module.fc.module.weight
    for _ in range(2):
        assert weight.shape == (3, DIM)
        with pytest.raises(RuntimeError, match="unit 'fc' is sharded now"):
            weight.detach().sum()
        differential.train(1)


@distributed(world_size=2)
def test_dtypes() -> None:
    """Compute dtype after forward, the parameters' own after backward; as torch."""
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    model = _make(mixed_precision=mixed).model
    for loss_scale in (1.0, 2.0):
        loss = model(_batch()).sum() * loss_scale
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
        loss.backward()
        assert {param.dtype for param in model.parameters()} == {torch.float64}


# Gradients out of order --------------------------------------------------------


@varied(quiet=[True, False], first=["penalty", "loss"])
@distributed(world_size=2)
def test_two_backwards_over_earlier_gradients(
    quiet: bool, first: str, world_size: int
) -> None:
    """The first gradient of a backward may be one that no unit's output announces."""
    both = _make()

    def loss_after_penalty(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        num_calls = 1 if model is both.model else world_size
        (_penalty(model) / num_calls).backward()
        return loss

    def loss_alone(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss

    for step in range(3):
        with both.no_sync(quiet and step < 2):
            both.backward_of(loss_alone if first == "loss" else loss_after_penalty)
    both.check()
    assert_idle(both.model)


@distributed(world_size=2)
def test_zero_grad_between() -> None:
    """Many loops call it there."""
    both = _make()

    def loss_and_clear(model: nn.Module, x: Tensor) -> Tensor:
        loss = _loss(model, x)
        model.zero_grad()
        return loss

    for _ in range(3):
        both.backward_of(loss_and_clear)
        both.check()


# What needs shards there -------------------------------------------------------


def _step_adam(model: Any) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    optimizer.step()


def _save(model: Any) -> None:
    assert model.state_dict()["inp.weight"].shape == (DIM, DIM)


def _load(model: Any) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def _summon(model: Any) -> None:
    with FSDP.summon_full_params(model), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def _clip(model: Any) -> None:
    if isinstance(model, FSDP):
        model.clip_grad_norm_(0.1)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def _halve(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def _replace_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.detach() * 0.5


def _replace(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach() * 0.5)


def _copy(model: nn.Module) -> None:
    copied = copy.deepcopy(model)
    assert_same("copy", copied(_batch()), model(_batch()), 1e-10)


BETWEEN: dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]] = {
    "step": (_step_adam, _step_adam),
    "save": (_save, _save),
    "load": (_load, _load),
    "summon": (_summon, _halve),
    "clip": (_clip, _clip),
    "write": (_halve, _halve),
    "copy": (_copy, _copy),
    "data": (_replace_data, _replace_data),
    "attribute": (_replace, _replace),
}


def _act(both: Differential, what: str) -> None:
    for model, act in zip((both.model, both.reference), BETWEEN[what], strict=True):
        act(model)
    both.reference_params = dict(both.reference.named_parameters())


@varied(what=list(BETWEEN), units=[{Block}, ()])
@distributed(world_size=2)
def test_after_a_forward_whose_loss_is_dropped(what: str, units: Any) -> None:
    """What steps, saves or writes there works on the shards, and nothing is lost."""
    both = _make(units)
    both.backward_of(_loss)
    _loss(both.model, _batch())
    _act(both, what)
    for model in (both.model, both.reference):
        model.zero_grad()
    both.backward_of(_loss)
    both.check()
    assert_idle(both.model)


@varied(what=["save", "clip"])
@distributed(world_size=2)
def test_backward_after_looking(what: str) -> None:
    """A loss that has whole parameters in it is as good as before."""
    both = _make()
    both.backward_of(_loss)
    both.backward_of(_loss, inside=lambda: _act(both, what))
    both.check()


@distributed(world_size=2)
def test_a_write_before_backward_is_kept() -> None:
    """In place, to a bias, which no graph has: backward may go on, and it stays."""
    both = _make()

    def write() -> None:
        with torch.no_grad():
            for module in (both.reference.get_submodule("inp"), both.model.module.inp):
                module.bias.add_(1)

    both.forward_backward(inside=write)
    both.check()


# What must raise ---------------------------------------------------------------


def _linears(model: Any) -> dict[str, nn.Linear]:
    return {"root": model.module.inp, "block": model.module.blocks[1].module.fc2}


@varied(where=["root", "block"], how=["data", "attribute"])
@distributed(world_size=2)
def test_replaced_before_backward(where: str, how: str) -> None:
    """FSDP1's error; and the next forward takes over what was put there."""
    both = _make()
    both.train(1)
    for _ in range(2):
        loss = _loss(both.model, _batch())
        linear = _linears(both.model)[where]
        if how == "data":
            linear.weight.data = linear.weight.clone()
        else:
            linear.weight = nn.Parameter(linear.weight.detach().clone())
        with pytest.raises(AssertionError, match=f"^{CHANGED}: parameter") as caught:
            loss.backward()
        name = "blocks.1" if where == "block" else "MLP"
        assert re.search(f"of unit '{name}' was replaced", str(caught.value))
        for _ in range(2):
            for model in (both.reference, both.model):
                model.zero_grad()
            both.backward_of(_loss)
            both.check()


@distributed(world_size=2)
def test_replaced_with_full_shard_is_taken_over() -> None:
    """There the shards show, and a write to them is a write."""
    both = _make(strategy="FULL_SHARD")
    weight = _linears(both.model)["block"].weight

    def replace() -> None:
        weight.data = weight.detach().clone()

    both.forward_backward(inside=replace)
    both.check()
