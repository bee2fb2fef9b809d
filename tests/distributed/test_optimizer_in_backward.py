"""Optimizers that step in backward, unit by unit, against a step after backward."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward,
    _get_in_backward_optimizers,
)
from torch.distributed.tensor import DTensor

import fsdp_c
from helpers.distributed import distributed
from helpers.groups import hybrid_groups
from helpers.impl import FSDP, CPUOffload, MixedPrecision, StateDictType, fsdp
from helpers.models import CASES, MLP, Block
from helpers.reference import Differential, assert_same_tensors, full_state_dict
from helpers.rows import APIS, Rows, as_double, in_either_api, shard_by

WORLD = 2
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    # No weight decay: it tells a gradient of zeros from None.
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.0),
    "decayed": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.3),
}


def _make(
    api: str, name: str = "mlp", optimizer: str = "adamw", **options: Any
) -> Differential:
    """Return both models; the sharded one's optimizer steps in backward."""
    case, build = CASES[name], OPTIMIZERS[optimizer]
    both = in_either_api(
        api, case.build, case.unit_classes, case.inputs, optimizer=build, **options
    )
    both.optimizer = fsdp_c.optimizer_in_backward(both.model, build)
    return both


def _train(both: Differential, num_steps: int = 3) -> None:
    """Run backwards, after which the reference's optimizer steps."""
    for _ in range(num_steps):
        both.reference_optimizer.zero_grad()
        both.forward_backward()
        both.reference_optimizer.step()


def _check(both: Differential) -> None:
    """Compare parameters: the sharded ones have no gradients."""
    expected = {n: p.detach() for n, p in both.reference_params.items()}
    assert_same_tensors("parameter", both.gather()[0], expected, both.tolerance)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", ["mlp", "tied", "unused", "frozen", "called_twice"])
@distributed(world_size=(WORLD, 3))
def test_equals_a_step_after_backward(name: str, api: str) -> None:
    """Micro-batches; no gradient is left, and learning rates are followed.

    DTensors know what no rank used.
    """
    for build in ("sgd", "decayed" if api == "fully_shard" else "adamw"):
        both = _make(api, name, build)
        optimizers = (both.optimizer, both.reference_optimizer)
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]
        for _ in range(3):
            both.reference.zero_grad()
            both.accumulate(2, no_sync=True)
            both.reference_optimizer.step()
            assert all(param.grad is None for param in both.model.parameters())
            assert fsdp_c.memory_stats(both.model)["grad_shard_nbytes"] == 0
            both.optimizer.step()  # as in a loop that was not changed: nothing happens
            for scheduler in schedulers:
                scheduler.step()
            _check(both)
    with pytest.raises(ValueError, match="has an optimizer in backward already"):
        fsdp_c.optimizer_in_backward(both.model, OPTIMIZERS["sgd"])


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    "strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
)
@distributed(world_size=WORLD)
def test_strategies(strategy: str, offload: bool) -> None:
    """Every strategy, with shards on the host as well."""
    is_hybrid = strategy == "HYBRID_SHARD"
    with hybrid_groups(2, 1) if is_hybrid else contextlib.nullcontext() as groups:
        both = _make(
            "FSDP",
            strategy=strategy,
            cpu_offload=CPUOffload(offload_params=offload),
            process_group=groups,
        )
        _train(both)
        _check(both)
        del both


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("api", ["FSDP", "FSDP flat"])
@distributed(world_size=WORLD)
def test_no_sync(api: str, sharded: bool) -> None:
    """Nothing steps under no_sync(); the backward that reduces takes the sum."""
    both = _make(api)
    for _ in range(2):
        both.reference.zero_grad()
        with both.model.no_sync(sharded=sharded):
            before = full_state_dict(both.model)
            both.forward_backward()
            both.forward_backward()
            assert_same_tensors("parameter", full_state_dict(both.model), before, 0.0)
        both.forward_backward()
        both.reference_optimizer.step()
        _check(both)


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


@pytest.mark.parametrize(
    ("api", "other"), [("FSDP", "FSDP flat"), ("FSDP flat", "FSDP")]
)
@distributed(world_size=WORLD)
def test_state_dict(api: str, other: str) -> None:
    """By name, as of a step after backward; training goes on with what is loaded."""
    both, resumed = _make(api), _make(other)
    _train(both)
    saved = FSDP.optim_state_dict(both.model, both.optimizer)
    for (name, _), expected in zip(
        both.reference.named_parameters(),
        both.reference_optimizer.state.values(),
        strict=True,
    ):
        assert_same_tensors(name, saved["state"][name], expected, 1e-9)

    resumed.model.load_state_dict(full_state_dict(both.model))
    resumed.reference.load_state_dict(both.reference.state_dict())
    state = FSDP.optim_state_dict_to_load(resumed.model, resumed.optimizer, saved)
    resumed.optimizer.load_state_dict(state)
    resumed.reference_optimizer.load_state_dict(both.reference_optimizer.state_dict())
    _train(resumed)
    _check(resumed)


@distributed(world_size=WORLD)
def test_groups_and_parameters_outside(world_size: int) -> None:
    """Groups keep their options; what is in no group, or in no unit, has gradients."""
    case = CASES["mlp"]

    def wrap(module: nn.Module) -> Any:
        ignored = module.get_parameter("blocks.0.fc1.bias")
        return fsdp(
            module, units={Block}, use_orig_params=True, ignored_states=[ignored]
        )

    def build(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        decayed = [p for n, p in named.items() if "weight" in n]
        others = [p for n, p in named.items() if "weight" not in n]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 0.01}],
            lr=0.05,
            weight_decay=0.0,
        )

    both = Differential(
        lambda: case.build().double(),
        wrap,
        lambda generator: as_double(case.inputs(generator)),
        use_orig_params=True,
    )
    block = both.model.blocks
    ignored, left_out = block[0].fc1.bias, block[1].fc1.bias
    named = dict(both.reference.named_parameters())
    outside = named.pop("blocks.1.fc1.bias")
    both.reference_optimizer = build(named)
    optimizer = fsdp_c.optimizer_in_backward(
        both.model,
        lambda _: build(
            {n: p for n, p in both.model.named_parameters() if p is not left_out}
        ),
    )
    for _ in range(3):
        _train(both, 1)
        with_grads = [p for p in both.model.parameters() if p.grad is not None]
        assert all(p is ignored or p is left_out for p in with_grads)
        assert ignored.grad is not None
        torch.distributed.all_reduce(ignored.grad)
        ignored.grad /= world_size
        optimizer.step()  # the ignored one
        optimizer.zero_grad()
    with FSDP.summon_full_params(both.model, with_grads=True):
        assert left_out.grad is not None
        torch.testing.assert_close(left_out.grad, outside.grad)
    _check(both)


@distributed(world_size=WORLD)
def test_fully_shard_keeps_what_no_optimizer_has() -> None:
    """Gradients of such parameters accumulate; the others' memory is one unit's."""
    case, name = CASES["mlp"], "blocks.1.fc1.bias"
    both = in_either_api("fully_shard", case.build, case.unit_classes)
    left_out, outside = (m.get_parameter(name) for m in (both.model, both.reference))
    held: list[int] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            params = both.model.parameters()
            held.append(sum(p.grad is not None for p in params if p is not left_out))
            super().step()

    fsdp_c.optimizer_in_backward(
        both.model,
        lambda params: Watched([p for p in params if p is not left_out], lr=0.1),
    )
    rest = [p for p in both.reference.parameters() if p is not outside]
    both.reference_optimizer = torch.optim.SGD(rest, lr=0.1)
    for _ in range(3):
        _train(both, 1)
        with_grads = [p for p in both.model.parameters() if p.grad is not None]
        assert len(with_grads) == 1
        assert with_grads[0] is left_out
        assert isinstance(left_out.grad, DTensor)
        torch.testing.assert_close(left_out.grad.full_tensor(), outside.grad)
        _check(both)
    assert max(held) < len(rest)


@pytest.mark.parametrize(
    ("api", "is_applied_first"),
    [("FSDP", True), *((api, False) for api in APIS)],
)
@distributed(world_size=WORLD)
def test_apply_optimizer_in_backward(api: str, is_applied_first: bool) -> None:
    """The function of torch, before and after sharding; its own hooks never run."""
    case = CASES["mlp"]
    kwargs = {"lr": 0.05, "weight_decay": 0.1}

    def apply(module: nn.Module) -> None:
        _apply_optimizer_in_backward(torch.optim.AdamW, module.parameters(), kwargs)

    def shard(module: nn.Module) -> Any:
        if is_applied_first:
            apply(module)
        sharded = shard_by(api, module, case.unit_classes)
        if not is_applied_first:
            apply(sharded)
        return sharded

    make: Any = Rows
    if api != "fully_shard":
        make = functools.partial(Differential, use_orig_params=api == "FSDP")
    both = make(
        lambda: case.build().double(),
        shard,
        lambda generator: as_double(case.inputs(generator)),
        optimizer=lambda params: torch.optim.AdamW(params, **kwargs),
    )
    for _ in range(3):
        _train(both, 1)
        assert all(param.grad is None for param in both.model.parameters())
    _check(both)
    params = list(both.model.parameters())
    assert len(_get_in_backward_optimizers(both.model)) == len(params)


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

    def make() -> Any:
        return fsdp(MLP(2), units={Block}, use_orig_params=True)

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
