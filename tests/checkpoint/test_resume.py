"""Training goes on after a load as if it had never stopped."""

import copy
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from fsdp_c import checkpoint, fully_shard
from helpers.distributed import distributed
from helpers.impl import FSDP, fsdp
from helpers.models import CASES, DIM, MLP, Block, WithEmpty
from helpers.reference import assert_same_tensors, full_state_dict
from helpers.rows import APIS, shard_by
from helpers.seeds import generator

Optimizer = torch.optim.Optimizer


class LowPrecisionStates(torch.optim.SGD):
    """SGD with a first gradient in bfloat16, which torch's load_state_dict() casts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            if param.grad is not None and "first" not in self.state[param]:
                self.state[param]["first"] = param.grad.to(torch.bfloat16)


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "low_precision": lambda params: LowPrecisionStates(params, lr=0.05),
}
BATCH = 84  # a multiple of all numbers of ranks


def _batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = generator("batch", step)
    return (
        torch.randn(BATCH, DIM, generator=numbers),
        torch.randn(BATCH, 3, generator=numbers),
    )


def _train(
    model: Any, optim: Optimizer, steps: Iterable[int], rank: int, world_size: int
) -> None:
    for step in steps:
        inputs, labels = (each.chunk(world_size)[rank] for each in _batch(step))
        optim.zero_grad()
        nn.functional.mse_loss(model(inputs), labels).backward()
        optim.step()


def _state_tensors(optim: Optimizer) -> dict[str, Tensor]:
    return {
        f"{key}.{name}": value
        for key, state in optim.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


@pytest.mark.trap(25)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world_size=(2, 3))
def test_resume_is_bitwise(
    rank: int, world_size: int, tmp_path: Path, name: str, use_orig_params: bool
) -> None:
    """10 steps are 5 steps, save, load into new objects, 5 steps."""

    def build(seed: int) -> tuple[Any, Optimizer, Any]:
        torch.manual_seed(seed)
        model = fsdp(MLP(), units={Block}, use_orig_params=use_orig_params)
        optim = OPTIMIZERS[name](model.parameters())
        return model, optim, torch.optim.lr_scheduler.StepLR(optim, 3)

    model, optim, scheduler = build(0)
    _train(model, optim, range(5), rank, world_size)
    scheduler.step()
    checkpoint.save(tmp_path / "step-5", model, optim, scheduler=scheduler)
    _train(model, optim, range(5, 10), rank, world_size)

    other, other_optim, other_scheduler = build(1)
    checkpoint.load(tmp_path / "step-5", other, other_optim, scheduler=other_scheduler)
    assert other_scheduler.state_dict() == scheduler.state_dict()
    _train(other, other_optim, range(5, 10), rank, world_size)
    for (first, a), (second, b) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert first == second
        assert torch.equal(a, b), first
    if not use_orig_params:
        return  # padding of flat states is not saved; it steps nothing
    expected, found = _state_tensors(optim), _state_tensors(other_optim)
    for key, value in found.items():
        if value.numel() and expected[key].numel():
            assert value.dtype == expected[key].dtype, key
            assert torch.equal(expected[key], value), key
    filled = {key for key, value in expected.items() if value.dim() and value.numel()}
    assert filled <= found.keys()


@distributed(world_size=2)
def test_saved_again_it_is_the_same(rank: int, world_size: int, tmp_path: Path) -> None:
    """save, load, save: the rank files are equal byte for byte."""
    model = fsdp(MLP(), units={Block}, use_orig_params=True)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    _train(model, optim, range(2), rank, world_size)
    checkpoint.save(tmp_path / "a", model, optim)
    torch.manual_seed(7)
    model = fsdp(MLP(), units={Block}, use_orig_params=True)
    optim = torch.optim.AdamW(model.parameters(), lr=0.5)
    checkpoint.load(tmp_path / "a", model, optim)
    assert optim.param_groups[0]["lr"] == 0.01
    checkpoint.save(tmp_path / "b", model, optim)
    name = f"rank-{rank:05d}-of-00002.safetensors"
    one, two = ((tmp_path / each / name).read_bytes() for each in "ab")
    begin = 8 + int.from_bytes(one[:8], "little")
    assert one[begin:] == two[begin:]
    assert len(one) == len(two)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=2)
def test_several_groups_and_params_never_stepped(
    rank: int, world_size: int, tmp_path: Path, strategy: str
) -> None:
    """Options stay with their parameters, which are in another order here."""

    def build(*, is_reversed: bool) -> tuple[Any, Optimizer]:
        torch.manual_seed(3)
        model = fsdp(MLP(), units={Block}, use_orig_params=True, strategy=strategy)
        named = list(model.named_parameters())
        biases = [p for n, p in named if n.endswith("bias")]
        weights = [p for n, p in named if n.endswith("weight")]
        groups: list[dict[str, Any]] = [
            {"params": biases, "weight_decay": 0.0, "lr": 0.5},
            {"params": weights, "lr": 0.25 if not is_reversed else 9.0},
        ]
        return model, torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    model, optim = build(is_reversed=False)
    model.out.weight.requires_grad_(False)  # never stepped
    _train(model, optim, range(2), rank, world_size)
    checkpoint.save(tmp_path / "c", model, optim)
    other, other_optim = build(is_reversed=True)
    checkpoint.load(tmp_path / "c", other, other_optim)
    assert [group["lr"] for group in other_optim.param_groups] == [0.5, 0.25]
    assert other_optim.state.get(other.out.weight, {}) == {}
    other.out.weight.requires_grad_(False)
    for each, opt in ((model, optim), (other, other_optim)):
        _train(each, opt, range(2, 4), rank, world_size)
    assert_same_tensors("state", full_state_dict(other), full_state_dict(model), 0.0)


@distributed(world_size=2)
def test_non_element_wise_state_of_whole_parameters(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """Adafactor's rows and columns: NO_SHARD keeps them; cut ones are refused."""

    def build(**kwargs: Any) -> tuple[Any, Optimizer]:
        torch.manual_seed(0)
        # Two ranks cut the first weight, with and without aligned shards.
        layers = nn.Linear(DIM, 13), nn.Tanh(), nn.Linear(13, 3)
        model = fsdp(nn.Sequential(*layers), use_orig_params=True, **kwargs)
        return model, torch.optim.Adafactor(model.parameters(), lr=0.05)

    model, optim = build(strategy="NO_SHARD")
    _train(model, optim, range(2), rank, world_size)
    names = {name for state in optim.state.values() for name in state}
    assert "row_var" in names
    checkpoint.save(tmp_path / "c", model, optim)
    other, other_optim = build(strategy="NO_SHARD")
    checkpoint.load(tmp_path / "c", other, other_optim)
    for each, opt in ((model, optim), (other, other_optim)):
        _train(each, opt, range(2, 4), rank, world_size)
    assert_same_tensors("state", full_state_dict(other), full_state_dict(model), 0.0)
    sharded, sharded_optim = build()
    before = copy.deepcopy(full_state_dict(sharded))
    with pytest.raises(checkpoint.CheckpointError, match=r"row_var.*not element-wise"):
        checkpoint.load(tmp_path / "c", sharded, sharded_optim)
    assert_same_tensors("state", full_state_dict(sharded), before, 0.0)
    checkpoint.load(tmp_path / "c", sharded)


@distributed(world_size=2)
def test_what_else_training_needs(rank: int, tmp_path: Path) -> None:
    """Scheduler, random states, position in the data: exact, of every kind."""
    model = fsdp(MLP(1), use_orig_params=True)
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optim)  # holds inf
    milestones = torch.optim.lr_scheduler.MultiStepLR(optim, [2, 2, 5])  # int keys
    extra = {
        "epoch": 3,
        "position": [1, (2, 3.5), None, True, "text \u00e9", b"\x00\xff"],
        "nested": {1: "int key", "$odd": math.inf, "nan": math.nan},
        "order": torch.arange(10).flip(0),
        "scalar": torch.tensor(0.1, dtype=torch.bfloat16),
    }
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)
    checkpoint.save(
        tmp_path / "c",
        model,
        optim,
        scheduler=milestones,
        extra=extra,
        rank_extra={"rank": rank, "seen": torch.full((2,), rank)},
    )
    drawn = torch.rand(3), random.random(), np.random.rand(3).tolist()
    milestones.step()
    found = checkpoint.load(tmp_path / "c", model, optim, scheduler=milestones)
    again = torch.rand(3), random.random(), np.random.rand(3).tolist()
    assert torch.equal(drawn[0], again[0])
    assert drawn[1:] == again[1:]
    assert milestones.last_epoch == 0
    assert type(found.extra) is dict
    assert torch.equal(found.extra.pop("order"), extra.pop("order").cpu())
    scalar = extra.pop("scalar").cpu()
    assert torch.equal(found.extra["scalar"], scalar)
    assert found.extra.pop("scalar").dtype == torch.bfloat16
    assert math.isnan(found.extra["nested"].pop("nan"))
    del extra["nested"]["nan"]
    assert found.extra == extra
    assert found.rank_extra["rank"] == rank
    assert found.rank_extra["seen"].tolist() == [rank, rank]
    checkpoint.save(tmp_path / "d", model, optim, scheduler=plateau)
    checkpoint.load(tmp_path / "d", model, optim, scheduler=plateau)
    assert plateau.best == math.inf
    with pytest.raises(checkpoint.CheckpointError, match="pass the scheduler"):
        checkpoint.load(tmp_path / "d", model, optim, scheduler=milestones)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_under_a_default_device(
    rank: int, world_size: int, tmp_path: Path, use_orig_params: bool
) -> None:
    """What is read goes through host memory, wherever tensors are made by default."""
    model = fsdp(MLP(1), use_orig_params=use_orig_params)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    _train(model, optim, range(2), rank, world_size)
    expected = {name: t.clone() for name, t in full_state_dict(model).items()}
    states = {key: t.clone() for key, t in _state_tensors(optim).items()}
    extra = {"order": torch.arange(10), "scalar": torch.tensor(2.5)}
    with torch.device("meta"):
        checkpoint.save(tmp_path / "c", model, optim, extra=extra)
    _train(model, optim, range(2, 4), rank, world_size)
    with torch.device("meta"):
        found = checkpoint.load(tmp_path / "c", model, optim)
    assert_same_tensors("state", full_state_dict(model), expected, 0.0)
    assert_same_tensors("optimizer", _state_tensors(optim), states, 0.0)
    assert found.extra["order"].tolist() == list(range(10))
    assert found.extra["scalar"].item() == 2.5


@pytest.mark.parametrize("before", APIS)
@pytest.mark.parametrize("after", APIS)
@distributed(world_size=(2, 3))
def test_an_empty_parameter(
    rank: int, world_size: int, tmp_path: Path, before: str, after: str
) -> None:
    """Its state is saved, too, and the flat parameter around it loads."""

    def build(seed: int, api: str) -> tuple[Any, Optimizer]:
        torch.manual_seed(seed)
        model = shard_by(api, WithEmpty(), {Block})
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def state_of(model: Any, optim: Optimizer) -> dict[str, Tensor]:
        full = StateDictOptions(full_state_dict=True)
        states: dict[str, Any]
        tensors, states = get_state_dict(model, optim, options=full)
        values = [(n, k, v) for n, s in states["state"].items() for k, v in s.items()]
        return {**tensors, **{f"{name} {key}": value for name, key, value in values}}

    model, optim = build(0, before)
    _train(model, optim, range(2), rank, world_size)
    checkpoint.save(tmp_path / "c", model, optim)
    checkpoint.verify(tmp_path / "c")
    other, other_optim = build(1, after)
    checkpoint.load(tmp_path / "c", other, other_optim)
    for each in ((model, optim), (other, other_optim)):
        found = state_of(*each)
        assert found["empty step"] == 2
        assert found["empty exp_avg"].shape == (0, 3)
        _train(*each, range(2, 4), rank, world_size)
    assert_same_tensors("state", state_of(other, other_optim), state_of(model, optim))


class WithUnused(nn.Module):
    """A layer, and a parameter of three times its elements that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(DIM, 3)
        self.unused = nn.Parameter(torch.randn(9 * (DIM + 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


@distributed(world_size=(2, 3))
def test_a_rank_of_params_never_stepped(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """A flat parameter has a state on all ranks, whatever they hold of it."""

    def build(wrap: Callable[[nn.Module], Any]) -> tuple[Any, Optimizer]:
        torch.manual_seed(0)
        model = wrap(WithUnused())
        return model, OPTIMIZERS["momentum"](model.parameters())

    model, optim = build(fully_shard)
    _train(model, optim, range(2), rank, world_size)
    checkpoint.save(tmp_path / "c", model, optim)
    flat, flat_optim = build(lambda module: fsdp(module, use_orig_params=False))
    checkpoint.load(tmp_path / "c", flat, flat_optim)
    found = FSDP.optim_state_dict(flat, flat_optim)["state"]
    assert not found.pop("unused")["momentum_buffer"].any()
    for name, state in found.items():
        value = state["momentum_buffer"]
        expected = optim.state[model.get_parameter(name)]["momentum_buffer"]
        assert torch.equal(value, expected.full_tensor().to(value.device)), name


class Chain(nn.Sequential):
    """Square layers of these names."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(DIM, DIM, bias=False))


@pytest.mark.parametrize("num_steps", [0, 2])
@distributed(world_size=(1, 2))
def test_a_new_layer_in_a_flat_parameter(tmp_path: Path, num_steps: int) -> None:
    """Its step counter differs from the loaded one, also where another rank has it."""

    def trained(names: str, num_steps: int) -> tuple[Any, Optimizer]:
        model = fsdp(Chain(names), use_orig_params=False)
        optim = OPTIMIZERS["adamw"](model.parameters())
        for _ in range(num_steps):
            model(torch.ones(2, DIM)).sum().backward()
            optim.step()
            optim.zero_grad()
        return model, optim

    checkpoint.save(tmp_path / "c", *trained("ab", 3))
    problem = r"'step' of 'b\.weight' is 3\.0"
    with pytest.raises(checkpoint.CheckpointError, match=problem):
        checkpoint.load(tmp_path / "c", *trained("bc", num_steps), strict=False)


@distributed(world_size=3)
def test_a_rank_of_padding(rank: int, tmp_path: Path) -> None:
    """Its step counter goes on with the others'."""

    def build() -> tuple[Any, Optimizer]:
        model = fsdp(nn.Linear(3, 1), use_orig_params=False)
        return model, OPTIMIZERS["amsgrad"](model.parameters())

    def train(model: Any, optim: Optimizer) -> dict[str, Any]:
        model(torch.ones(2, 3)).sum().backward()
        optim.step()
        state: dict[str, Any] = FSDP.optim_state_dict(model, optim)["state"]
        return state

    model, optim = build()
    train(model, optim)
    checkpoint.save(tmp_path / "c", model, optim)
    other, other_optim = build()
    checkpoint.load(tmp_path / "c", other, other_optim)
    assert train(other, other_optim)["bias"]["step"] == 2
    assert {int(state["step"]) for state in other_optim.state.values()} == {2}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3))
def test_models(tmp_path: Path, case: str, use_orig_params: bool) -> None:
    """Tied, frozen, scalar, empty, mixed: into another wrapping, bit for bit."""
    model = fsdp(
        CASES[case].build(),
        units=CASES[case].unit_classes,
        use_orig_params=use_orig_params,
    )
    expected = copy.deepcopy(full_state_dict(model))
    checkpoint.save(tmp_path / "c", model)
    checkpoint.verify(tmp_path / "c")
    torch.manual_seed(99)
    other = fsdp(CASES[case].build(), use_orig_params=not use_orig_params)
    found = checkpoint.load(tmp_path / "c", other)
    assert found.missing == found.unexpected == ()
    assert_same_tensors("state", full_state_dict(other), expected, 0.0)
    assert list(full_state_dict(other)) == list(expected)
    inputs = CASES[case].inputs(generator("x"))
    other(*inputs)  # works, with the values that were loaded
