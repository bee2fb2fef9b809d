"""Optimizers that step in backward, unit by unit, against a step after backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import (
    _apply_optimizer_in_backward,
    _get_in_backward_optimizers,
)
from torch.distributed.tensor import DTensor

import fsdp_c
from helpers.distributed import distributed
from helpers.groups import hybrid_groups
from helpers.impl import (
    FSDP,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fsdp,
)
from helpers.models import CASES, MLP, Block, Case, loss_of
from helpers.reference import assert_same_tensors, full_state_dict
from helpers.rows import shard_units
from helpers.seeds import seeded

WORLD = 2
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    # No weight decay: it tells a gradient of zeros from None.
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.0),
    "decayed": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.3),
}


def _batch(case: Case, step: int, rank: int) -> tuple[Tensor, ...]:
    inputs = case.inputs(seeded(97 * step + rank))
    return tuple(x.double() if x.is_floating_point() else x for x in inputs)


def _train_reference(
    model: nn.Module, case: Case, optimizer: torch.optim.Optimizer, steps: range
) -> None:
    for step in steps:
        optimizer.zero_grad()
        losses = [loss_of(model(*_batch(case, step, r))) for r in range(WORLD)]
        torch.stack(losses).mean().backward()
        optimizer.step()


def _check(model: nn.Module, reference: nn.Module) -> None:
    expected = {name: p.detach() for name, p in reference.named_parameters()}
    if isinstance(model, fsdp_c.FSDPModule):
        state = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True)
        )
    else:
        state = full_state_dict(model)
    assert_same_tensors(
        "parameter", {name: state[name] for name in expected}, expected, 1e-9
    )


def _wrap(case: Case, module: nn.Module, **kwargs: Any) -> Any:
    policy = ModuleWrapPolicy(set(case.unit_classes)) if case.unit_classes else None
    return fsdp(module, auto_wrap_policy=policy, **kwargs)


def _build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build().double()


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("name", ["mlp", "tied", "unused", "frozen", "called_twice"])
@distributed(world_size=WORLD)
def test_equals_a_step_after_backward(
    rank: int, name: str, use_orig_params: bool
) -> None:
    """In fp64; no gradient is left, and learning rates are followed."""
    case = CASES[name]
    for build in (OPTIMIZERS["sgd"], OPTIMIZERS["adamw"]):
        reference = _build(case)
        model = _wrap(case, _build(case), use_orig_params=use_orig_params)
        optimizer = fsdp_c.optimizer_in_backward(model, build)
        expected = build(list(reference.parameters()))
        schedulers = [
            torch.optim.lr_scheduler.StepLR(each, 1, 0.5)
            for each in (optimizer, expected)
        ]
        for step in range(3):
            _train_reference(reference, case, expected, range(step, step + 1))
            loss_of(model(*_batch(case, step, rank))).backward()
            assert all(param.grad is None for param in model.parameters())
            optimizer.step()  # as in a loop that was not changed: nothing happens
            for scheduler in schedulers:
                scheduler.step()
        _check(model, reference)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    "strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
)
@distributed(world_size=WORLD)
def test_strategies(rank: int, strategy: str, offload: bool) -> None:
    """Every strategy, with shards on the host as well."""
    if strategy == "HYBRID_SHARD":
        with hybrid_groups(2, 1) as groups:
            _train_with(rank, strategy, offload, process_group=groups)
    else:
        _train_with(rank, strategy, offload)


def _train_with(rank: int, strategy: str, offload: bool, **kwargs: Any) -> None:
    case, build = CASES["mlp"], OPTIMIZERS["adamw"]
    reference = _build(case)
    model = _wrap(
        case,
        _build(case),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy[strategy],
        cpu_offload=CPUOffload(offload_params=offload),
        **kwargs,
    )
    fsdp_c.optimizer_in_backward(model, build)
    _train_reference(reference, case, build(list(reference.parameters())), range(3))
    for step in range(3):
        loss_of(model(*_batch(case, step, rank))).backward()
    _check(model, reference)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=WORLD)
def test_no_sync(
    rank: int, world_size: int, use_orig_params: bool, sharded: bool
) -> None:
    """Nothing steps under no_sync(); the backward that reduces takes the sum."""
    case, build = CASES["mlp"], OPTIMIZERS["adamw"]
    reference = _build(case)
    expected = build(list(reference.parameters()))
    model = _wrap(case, _build(case), use_orig_params=use_orig_params)
    fsdp_c.optimizer_in_backward(model, build)
    for step in range(2):
        expected.zero_grad()
        for micro in range(3):
            for r in range(world_size):
                batch = _batch(case, 10 * step + micro, r)
                (loss_of(reference(*batch)) / world_size).backward()
        expected.step()
        with model.no_sync(sharded=sharded):
            before = full_state_dict(model)
            for micro in range(2):
                loss_of(model(*_batch(case, 10 * step + micro, rank))).backward()
            assert_same_tensors("parameter", full_state_dict(model), before, 0.0)
        loss_of(model(*_batch(case, 10 * step + 2, rank))).backward()
        _check(model, reference)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=WORLD)
def test_gradient_memory_is_one_unit(world_size: int, use_orig_params: bool) -> None:
    """When a unit steps, no other unit's sharded gradient is there."""
    num_blocks = 4
    model = fsdp(
        nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(num_blocks))),
        units={nn.Linear},
        use_orig_params=use_orig_params,
    )
    unit_nbytes = 16 * 16 * 4 // world_size
    held: list[int] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            held.append(fsdp_c.memory_stats(model)["grad_shard_nbytes"])
            super().step()

    fsdp_c.optimizer_in_backward(model, lambda params: Watched(params, lr=0.1))
    for _ in range(2):
        held.clear()
        model(torch.randn(2, 16)).sum().backward()
        assert held == [unit_nbytes] * num_blocks
        assert fsdp_c.memory_stats(model)["grad_shard_nbytes"] == 0


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=WORLD)
def test_state_dict(rank: int, use_orig_params: bool) -> None:
    """By name, as of a step after backward; training goes on with what is loaded."""
    case, build = CASES["mlp"], OPTIMIZERS["adamw"]
    reference = _build(case)
    expected = build(list(reference.parameters()))
    model = _wrap(case, _build(case), use_orig_params=use_orig_params)
    optimizer = fsdp_c.optimizer_in_backward(model, build)
    _train_reference(reference, case, expected, range(3))
    for step in range(3):
        loss_of(model(*_batch(case, step, rank))).backward()
    saved, params = FSDP.optim_state_dict(model, optimizer), full_state_dict(model)
    for (name, _), mine in zip(
        reference.named_parameters(), expected.state.values(), strict=True
    ):
        assert_same_tensors(name, saved["state"][name], mine, 1e-9)

    resumed = _wrap(case, _build(case), use_orig_params=not use_orig_params)
    resumed.load_state_dict(params)
    optimizer = fsdp_c.optimizer_in_backward(resumed, build)
    state = FSDP.optim_state_dict_to_load(resumed, optimizer, saved)
    optimizer.load_state_dict(state)
    _train_reference(reference, case, expected, range(3, 6))
    for step in range(3, 6):
        loss_of(resumed(*_batch(case, step, rank))).backward()
    _check(resumed, reference)


@distributed(world_size=WORLD)
def test_groups_and_parameters_outside(rank: int, world_size: int) -> None:
    """Groups keep their options; what is in no group, or in no unit, has gradients."""
    case = CASES["mlp"]
    reference = _build(case)
    module = _build(case)
    ignored = module.get_parameter("blocks.0.fc1.bias")
    left_out = module.get_parameter("blocks.1.fc1.bias")
    model = _wrap(case, module, use_orig_params=True, ignored_states=[ignored])

    def build(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        names = {id(p): n for n, p in model.named_parameters()}
        rest = [p for p in params if p is not left_out]
        decayed = [p for p in rest if "weight" in names[id(p)]]
        others = [p for p in rest if "weight" not in names[id(p)]]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 0.01}],
            lr=0.05,
            weight_decay=0.0,
        )

    named = dict(reference.named_parameters())
    outside = named.pop("blocks.1.fc1.bias")
    expected = torch.optim.AdamW(
        [
            {
                "params": [p for n, p in named.items() if "weight" in n],
                "weight_decay": 0.3,
            },
            {"params": [p for n, p in named.items() if "weight" not in n], "lr": 0.01},
        ],
        lr=0.05,
        weight_decay=0.0,
    )
    optimizer = fsdp_c.optimizer_in_backward(model, build)
    for step in range(3):
        _train_reference(reference, case, expected, range(step, step + 1))
        loss_of(model(*_batch(case, step, rank))).backward()
        with_grads = [p for p in model.parameters() if p.grad is not None]
        assert all(p is ignored or p is left_out for p in with_grads)
        assert ignored.grad is not None
        torch.distributed.all_reduce(ignored.grad)
        ignored.grad /= world_size
        optimizer.step()  # the ignored one
        optimizer.zero_grad()
    with FSDP.summon_full_params(model, with_grads=True):
        assert left_out.grad is not None
        assert outside.grad is not None
        torch.testing.assert_close(left_out.grad, outside.grad)
    _check(model, reference)


@pytest.mark.parametrize("name", ["mlp", "tied", "unused", "frozen", "called_twice"])
@distributed(world_size=(WORLD, 3))
def test_fully_shard(rank: int, world_size: int, name: str) -> None:
    """The same with DTensors, which know what no rank used; and without sync."""
    case, build = CASES[name], OPTIMIZERS["decayed"]
    reference = _build(case)
    expected = build(list(reference.parameters()))
    model = shard_units(_build(case), case.unit_classes)
    optimizer = fsdp_c.optimizer_in_backward(model, build)
    for step in range(3):
        expected.zero_grad()
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss_of(model(*_batch(case, 2 * step + micro, rank))).backward()
            for r in range(world_size):
                batch = _batch(case, 2 * step + micro, r)
                (loss_of(reference(*batch)) / world_size).backward()
        expected.step()
        assert all(param.grad is None for param in model.parameters())
        assert fsdp_c.memory_stats(model)["grad_shard_nbytes"] == 0
        optimizer.step()  # nothing
        _check(model, reference)
    with pytest.raises(ValueError, match="has an optimizer in backward already"):
        fsdp_c.optimizer_in_backward(model, build)


@distributed(world_size=WORLD)
def test_fully_shard_keeps_what_no_optimizer_has(rank: int) -> None:
    """Gradients of such parameters accumulate; the others' memory is one unit's."""
    case = CASES["mlp"]
    reference = _build(case)
    model = shard_units(_build(case), case.unit_classes)
    left_out = model.get_parameter("blocks.1.fc1.bias")
    outside = reference.get_parameter("blocks.1.fc1.bias")
    held: list[int] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            held.append(
                sum(p.grad is not None for p in model.parameters() if p is not left_out)
            )
            super().step()

    fsdp_c.optimizer_in_backward(
        model, lambda params: Watched([p for p in params if p is not left_out], lr=0.1)
    )
    rest = [p for p in reference.parameters() if p is not outside]
    expected = torch.optim.SGD(rest, lr=0.1)
    for step in range(3):
        _train_reference(reference, case, expected, range(step, step + 1))
        loss_of(model(*_batch(case, step, rank))).backward()
        with_grads = [p for p in model.parameters() if p.grad is not None]
        assert len(with_grads) == 1
        assert with_grads[0] is left_out
        assert isinstance(left_out.grad, DTensor)
        torch.testing.assert_close(left_out.grad.full_tensor(), outside.grad)
        _check(model, reference)
    assert max(held) < len(rest)


@distributed(world_size=WORLD)
def test_fully_shard_with_apply_optimizer_in_backward(rank: int) -> None:
    """Torch's function on sharded parameters; its own hooks would never run."""
    case = CASES["mlp"]
    kwargs = {"lr": 0.05, "weight_decay": 0.1}
    reference = _build(case)
    expected = torch.optim.AdamW(reference.parameters(), **kwargs)
    model = shard_units(_build(case), case.unit_classes)
    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), kwargs)
    _train_reference(reference, case, expected, range(3))
    for step in range(3):
        loss_of(model(*_batch(case, step, rank))).backward()
        assert all(param.grad is None for param in model.parameters())
    _check(model, reference)


@distributed(world_size=WORLD)
def test_mixed_precision() -> None:
    """The sharded gradient has the master dtype when the optimizer steps."""
    dtypes: set[torch.dtype] = set()

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                dtypes.update(p.grad.dtype for p in group["params"] if p.numel())
            super().step()

    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = fsdp(MLP(2), use_orig_params=True, mixed_precision=precision)
    fsdp_c.optimizer_in_backward(model, lambda params: Watched(params, lr=0.1))
    model(torch.randn(2, 6)).float().sum().backward()
    assert dtypes == {torch.float32}


@distributed(world_size=WORLD)
def test_refused() -> None:
    """What needs all gradients, or several of them; each with the reason."""
    x = torch.randn(2, 6)

    def make(**kwargs: Any) -> Any:
        policy = ModuleWrapPolicy({Block})
        return fsdp(MLP(2), auto_wrap_policy=policy, use_orig_params=True, **kwargs)

    with pytest.raises(ValueError, match="pass the wrapped model"):
        fsdp_c.optimizer_in_backward(MLP(1), OPTIMIZERS["sgd"])
    model = make()
    with pytest.raises(TypeError, match=r"build must return a torch\.optim\.Optimizer"):
        fsdp_c.optimizer_in_backward(model, lambda params: params)  # type: ignore[arg-type, return-value]
    fsdp_c.optimizer_in_backward(model, OPTIMIZERS["sgd"])
    with pytest.raises(ValueError, match="has an optimizer in backward already"):
        fsdp_c.optimizer_in_backward(model, OPTIMIZERS["sgd"])
    model(x).sum().backward()
    message = r"clip_grad_norm_\(\) needs the gradients of all units at once"
    with pytest.raises(RuntimeError, match=message):
        model.clip_grad_norm_(1.0)

    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1

    model = make()
    fsdp_c.optimizer_in_backward(model, lambda params: Counts(params, lr=0.1))
    with pytest.raises(RuntimeError, match="Counts changes 'k' of its param_groups"):
        model(x).sum().backward()


@pytest.mark.parametrize("is_applied_first", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=WORLD)
def test_apply_optimizer_in_backward(
    rank: int, use_orig_params: bool, is_applied_first: bool
) -> None:
    """The function of torch, before and after wrapping."""
    if not use_orig_params and is_applied_first:
        pytest.skip("the optimizers step parameters that flat ones replace")
    case = CASES["mlp"]
    kwargs = {"lr": 0.05, "weight_decay": 0.1}
    reference, module = _build(case), _build(case)
    expected = torch.optim.AdamW(reference.parameters(), **kwargs)
    if is_applied_first:
        _apply_optimizer_in_backward(torch.optim.AdamW, module.parameters(), kwargs)
    model = _wrap(case, module, use_orig_params=use_orig_params)
    if not is_applied_first:
        _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), kwargs)
    _train_reference(reference, case, expected, range(3))
    for step in range(3):
        loss_of(model(*_batch(case, step, rank))).backward()
        assert all(param.grad is None for param in model.parameters())
    _check(model, reference)
    assert len(_get_in_backward_optimizers(model)) == len(list(model.parameters()))


@distributed(world_size=WORLD)
def test_an_optimizer_that_raises() -> None:
    """Its exception leaves backward; the model can be used afterwards."""

    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if self.fails:
                raise ZeroDivisionError("mine")
            super().step()

    model = fsdp(MLP(2), units={Block})
    optimizer = fsdp_c.optimizer_in_backward(model, lambda ps: Failing(ps, lr=0.1))
    with pytest.raises(ZeroDivisionError, match="mine"):
        model(torch.ones(2, 6)).sum().backward()
    Failing.fails = False
    fsdp_c.reset(model)
    before = full_state_dict(model)
    model(torch.ones(2, 6)).sum().backward()
    after = full_state_dict(model)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


@distributed(world_size=WORLD)
def test_sharded_state() -> None:
    """SHARDED state dicts of parameters and optimizer, as of any optimizer."""
    model = fsdp(MLP(1), units={Block})
    optimizer = fsdp_c.optimizer_in_backward(model, OPTIMIZERS["adamw"])
    model(torch.ones(2, 6)).sum().backward()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = FSDP.optim_state_dict(model, optimizer)
    assert sorted(state["state"]) == sorted(full_state_dict(model))
