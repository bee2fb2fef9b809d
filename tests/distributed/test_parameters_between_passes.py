"""Parameters between forward and backward: whole with SHARD_GRAD_OP, as in FSDP1.

A use of them there, such as a penalty on weights, is of whole parameters, and its
gradient counts. What the user writes there is not lost.
"""

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers.distributed import TEST_DEVICE, distributed, varied
from helpers.groups import hybrid_groups
from helpers.impl import (
    FSDP,
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    assert_idle,
    fsdp,
)
from helpers.models import DIM, MLP, Block
from helpers.reference import assert_same, clean_name
from helpers.seeds import seeded
from helpers.transports import over

CHANGED = "FSDP does not support changing the parameters between forward and backward"
KEEPING = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")


def _batch(step: int = 0) -> Tensor:
    """Return the same on all ranks, so the mean of gradients is one of them."""
    generator = seeded(step)
    return torch.randn(4, DIM, generator=generator, dtype=torch.float64).to(TEST_DEVICE)


def _both(**kwargs: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(5)
    reference = MLP(2).double().to(TEST_DEVICE)
    kwargs = {
        "units": {Block},
        "strategy": "SHARD_GRAD_OP",
        "use_orig_params": True,
        **kwargs,
    }
    return reference, fsdp(copy.deepcopy(reference), **kwargs)


def _penalty(model: nn.Module) -> Tensor:
    """Of every parameter, and not linear: a part of it gives another number."""
    terms = [param.square().sum().sqrt() for param in model.parameters()]
    return 0.1 * torch.stack(terms).sum()


def _loss(model: nn.Module, step: int = 0) -> Tensor:
    loss: Tensor = model(_batch(step)).square().mean()
    return loss + _penalty(model)


def _shapes(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(param.shape) for param in model.parameters()]


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {
        clean_name(name): param.grad.clone()
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def _check(model: Any, reference: nn.Module) -> None:
    """Compare parameters and gradients with the unsharded model's."""
    with FSDP.summon_full_params(model, with_grads=True):
        mine, my_grads = dict(model.named_parameters()), _grads(model)
        for name, param in reference.named_parameters():
            assert_same(name, mine[name], param, 1e-10)
        expected = _grads(reference)
        assert my_grads.keys() == expected.keys()
        for name, grad in expected.items():
            assert_same(f"gradient of {name}", my_grads[name], grad, 1e-10)


def _train(reference: nn.Module, model: Any, schedule: str) -> None:
    """Run micro-steps: b backward, n one within no_sync, z zero_grad, s step."""
    models = (reference, model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, 0.9) for each in models]
    for step, action in enumerate(schedule):
        for each, optimizer in zip(models, optimizers, strict=True):
            if action == "s":
                optimizer.step()
            elif action == "z":
                optimizer.zero_grad()
            else:
                is_quiet = action == "n" and each is model
                with each.no_sync() if is_quiet else nullcontext():
                    _loss(each, step).backward()
        if action != "n":
            _check(model, reference)


SCHEDULE = "bszbbsznnbsznzbs"


@pytest.mark.each_value
@varied(
    units=[{Block}, ()],
    transport=["default", "c10d"],
    prefetch=[BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None],
)
@distributed(world_size=(2, 3))
def test_penalty_on_weights(
    units: Any, transport: str, prefetch: BackwardPrefetch | None
) -> None:
    """Loss, gradients and parameters are the unsharded model's, in fp64."""
    with over("c10d") if transport == "c10d" else nullcontext():
        reference, model = _both(
            units=units, backward_prefetch=prefetch, forward_prefetch=bool(prefetch)
        )
        assert_same("loss", _loss(model), _loss(reference), 1e-12)
        _train(reference, model, SCHEDULE)
        assert_idle(model)


@pytest.mark.each_value
@varied(strategy=["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"], offloads=[False, True])
@distributed(world_size=4)
def test_hybrid_and_offload(strategy: str, offloads: bool) -> None:
    """Only the second one is whole after forward."""
    with hybrid_groups(2, 2) as groups:
        reference, model = _both(
            strategy=strategy,
            process_group=groups,
            cpu_offload=CPUOffload(offloads),
        )
        loss = model(_batch()).sum()
        assert (_shapes(model) == _shapes(reference)) == (strategy in KEEPING)
        loss.backward()
        model.zero_grad()
        if strategy in KEEPING:
            _train(reference, model, SCHEDULE)
        assert_idle(model)


@distributed(world_size=2)
def test_offload() -> None:
    """Penalty and step, with shards in host memory."""
    reference, model = _both(cpu_offload=CPUOffload(True))
    _train(reference.cpu() if TEST_DEVICE == "cpu" else reference, model, SCHEDULE)


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
            out = model(_batch().float()).float().square().mean()
            params = [(p.shape, p.dtype) for p in model.parameters()]
            loss = out + _penalty(model).float()
            loss.backward()
            seen.append((params, loss.detach(), _grads(model), _shapes(model)))
        mine, expected = seen
        tolerance = 1e-5 if mixed is None else 2e-2
        assert mine[0] == expected[0]
        assert mine[3] == expected[3]  # of the shards again
        assert_same("loss", mine[1], expected[1], tolerance)
        assert mine[2].keys() == expected[2].keys()
        for name, grad in expected[2].items():
            assert_same(f"gradient of {name}", mine[2][name], grad, tolerance)


# What is shown ----------------------------------------------------------------


@varied(
    strategy=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"], use_orig_params=[True, False]
)
@distributed(world_size=2)
def test_what_is_shown(strategy: str, use_orig_params: bool) -> None:
    """Whole from the end of a forward that records to the unit's backward."""
    _, model = _both(strategy=strategy, use_orig_params=use_orig_params)
    root, block = model.module, model.module.blocks[1].module
    weights = {"root": lambda: root.out.weight, "block": lambda: block.fc1.weight}
    whole = {"root": (3, DIM), "block": (10, DIM)}
    model(_batch()).sum().backward()
    sharded = {name: tuple(get().shape) for name, get in weights.items()}
    assert (sharded == whole) == (strategy == "NO_SHARD")
    shown = whole if strategy == "SHARD_GRAD_OP" else sharded

    def look() -> dict[str, tuple[int, ...]]:
        return {name: tuple(get().shape) for name, get in weights.items()}

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


@distributed(world_size=2)
def test_dtypes() -> None:
    """Compute dtype after forward, the parameters' own after backward; as torch."""
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    _, model = _both(mixed_precision=mixed)
    for loss_scale in (1.0, 2.0):
        loss = model(_batch()).sum() * loss_scale
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
        loss.backward()
        assert {param.dtype for param in model.parameters()} == {torch.float64}


# Gradients out of order --------------------------------------------------------


@varied(quiet=[True, False], first=["penalty", "loss"])
@distributed(world_size=2)
def test_two_backwards_over_earlier_gradients(quiet: bool, first: str) -> None:
    """The first gradient of a backward may be one that no unit's output announces."""
    reference, model = _both()
    for step in range(3):
        for each in (reference, model):
            with model.no_sync() if quiet and step < 2 else nullcontext():
                loss = each(_batch(step)).square().mean()
                if first == "loss":
                    loss.backward(retain_graph=True)
                    continue
                _penalty(each).backward()
                loss.backward()
    _check(model, reference)
    assert_idle(model)


@distributed(world_size=2)
def test_zero_grad_between() -> None:
    """Many loops call it there."""
    reference, model = _both()
    for step in range(3):
        for each in (reference, model):
            loss = _loss(each, step)
            each.zero_grad()
            loss.backward()
        _check(model, reference)


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


@varied(what=list(BETWEEN), units=[{Block}, ()])
@distributed(world_size=2)
def test_after_a_forward_whose_loss_is_dropped(what: str, units: Any) -> None:
    """What steps, saves or writes there works on the shards, and nothing is lost."""
    reference, model = _both(units=units)
    for each, act in zip((model, reference), BETWEEN[what], strict=True):
        _loss(each).backward()
        _loss(each, 1)
        act(each)
        each.zero_grad()
        _loss(each, 2).backward()
    _check(model, reference)
    assert_idle(model)


@varied(what=["save", "clip"])
@distributed(world_size=2)
def test_backward_after_looking(what: str) -> None:
    """A loss that has whole parameters in it is as good as before."""
    reference, model = _both()
    for each, act in zip((model, reference), BETWEEN[what], strict=True):
        _loss(each).backward()
        loss = _loss(each, 1)
        act(each)
        loss.backward()
    _check(model, reference)


@distributed(world_size=2)
def test_a_write_before_backward_is_kept() -> None:
    """In place, to a bias, which no graph has: backward may go on, and it stays."""
    reference, model = _both()
    for each in (reference, model):
        loss = each(_batch()).square().mean()
        with torch.no_grad():
            each.get_submodule("inp" if each is reference else "module.inp").bias.add_(
                1
            )
        loss.backward()
    _check(model, reference)


# What must raise ---------------------------------------------------------------


def _linears(model: Any) -> dict[str, nn.Linear]:
    return {"root": model.module.inp, "block": model.module.blocks[1].module.fc2}


@varied(where=["root", "block"], how=["data", "attribute"])
@distributed(world_size=2)
def test_replaced_before_backward(where: str, how: str) -> None:
    """FSDP1's error; and the next forward takes over what was put there."""
    _, model = _both()
    _loss(model).backward()
    model.zero_grad()
    for _ in range(2):
        loss = _loss(model, 1)
        linear = _linears(model)[where]
        if how == "data":
            linear.weight.data = linear.weight.clone()
        else:
            linear.weight = nn.Parameter(linear.weight.detach().clone())
        with pytest.raises(AssertionError, match=f"^{CHANGED}: parameter") as caught:
            loss.backward()
        name = "blocks.1" if where == "block" else "MLP"
        assert re.search(f"of unit '{name}' was replaced", str(caught.value))
        reference, _ = _both()
        for each in (reference, model):
            each.zero_grad()
            _loss(each, 2).backward()
        _check(model, reference)
        model.zero_grad()


@distributed(world_size=2)
def test_replaced_with_full_shard_is_taken_over() -> None:
    """There the shards show, and a write to them is a write."""
    reference, model = _both(strategy="FULL_SHARD")
    weight = _linears(model)["block"].weight
    loss = model(_batch()).square().mean()
    weight.data = weight.detach().clone()
    loss.backward()
    reference(_batch()).square().mean().backward()
    _check(model, reference)
