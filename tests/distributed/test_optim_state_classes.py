"""Optimizer states of tensor classes of their own, in state dicts and checkpoints.

tests/programs/test_eight_bit.py has those of torchao.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_c import FSDP, checkpoint, fully_shard
from fsdp_c.integrations import installed
from helpers.distributed import distributed

aten: Any = torch.ops.aten


class Halved(Tensor):
    """Wraps the half of its values; its class cannot be cut."""

    _kept = (aten.detach.default, aten.view.default)

    def __new__(cls, half: Tensor) -> "Halved":
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, half.shape, dtype=half.dtype, device=half.device
        )

    def __init__(self, half: Tensor) -> None:
        self.half = half

    def __tensor_flatten__(self) -> Any:
        return ["half"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Any, context: Any, size: Any, stride: Any
    ) -> Any:
        return cls(inner["half"])

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        if function in cls._kept:
            return cls(function(args[0].half, *args[1:], **(kwargs or {})))
        if function is aten.copy_.default and cls is not Opaque:
            target, source = args
            if isinstance(source, Halved):
                return target.copy_(source.half * 2)
            target.half.copy_(source / 2)
            return target
        if function is aten._to_copy.default:
            return args[0]
        raise NotImplementedError(f"{cls.__name__} has no {function}")


class Opaque(Halved):
    """The same, without values."""


class Named(Tensor):
    """A class with memory of its own."""


def _doubled(values: Tensor, kind: type[Tensor]) -> Tensor:
    if kind is Named:
        return values.as_subclass(Named)
    return kind(values / 2)  # type: ignore[call-arg]


class Momentum(torch.optim.Optimizer):
    """SGD with a momentum of class ``kind``."""

    def __init__(self, params: Any, kind: type[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                local, grad = (
                    getattr(x, "_local_tensor", x) for x in (param, param.grad)
                )
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = _doubled(torch.zeros_like(local), self.kind)
                own = state["momentum"]
                values = own.as_subclass(Tensor) if self.kind is Named else own.half * 2
                values = 0.9 * values + grad
                if self.kind is Named:
                    own.copy_(values)
                else:
                    own.half.copy_(values / 2)
                local -= group["lr"] * values


def _build(door: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    if door == "rows":
        return fully_shard(model)
    return FSDP(model, use_orig_params=door == "originals")


def _step(model: Any, optim: Momentum, rank: int) -> Tensor:
    out: Tensor = model(torch.ones(2, 6) * (rank + 1))
    out.square().mean().backward()
    optim.step()
    optim.zero_grad()
    return out.detach()


def _kinds(optim: Momentum) -> set[type]:
    return {type(s["momentum"]) for s in optim.state.values() if s["momentum"].numel()}


@pytest.mark.parametrize("kind", [Halved, Named])
@pytest.mark.parametrize("door", ["originals", "flat"])
@pytest.mark.parametrize("how", ["full", "local", "checkpoint"])
@distributed(world_size=2)
def test_class_stays(
    rank: int, tmp_path: Path, kind: type[Tensor], door: str, how: str
) -> None:
    """A fresh optimizer gets the values in its class, and goes on as the first one."""
    model, other = _build(door), _build(door)
    optim, other_optim = (Momentum(m.parameters(), kind) for m in (model, other))
    for _ in range(2):
        _step(model, optim, rank)
    if how == "checkpoint":
        checkpoint.save(tmp_path / "c", model, optim)
        checkpoint.load(tmp_path / "c", other, other_optim)
    else:
        local = torch.distributed.fsdp.StateDictType.LOCAL_STATE_DICT
        if how == "local":
            for each in (model, other):
                FSDP.set_state_dict_type(each, local)
        other.load_state_dict(model.state_dict())
        found = FSDP.optim_state_dict(model, optim)
        loaded = FSDP.optim_state_dict_to_load(other, other_optim, found)
        other_optim.load_state_dict(loaded)
    assert _kinds(other_optim) == _kinds(optim) == {kind}
    for _ in range(2):
        expected = _step(model, optim, rank)
        assert torch.equal(_step(other, other_optim, rank), expected)


@distributed(world_size=2)
def test_refused_when_training_starts(rank: int) -> None:
    """Under `fsdp_c launch` at the first step; else at the save. By name."""
    what = "Momentum's state 'momentum' of parameter {}.*Opaque.*plain tensors"
    model = _build("originals")
    optim = Momentum(model.parameters(), Opaque)
    _step(model, optim, rank)
    with pytest.raises(TypeError, match=what.format("'[02].(weight|bias)'")):
        FSDP.optim_state_dict(model, optim)
    with installed():
        other = _build("originals")
        named = Momentum(other.named_parameters(), Opaque)
        for each, name in (
            (named, "'[02].(weight|bias)'"),
            (optim, r"number \d of unit"),
        ):
            its_model = other if each is named else model
            with pytest.raises(TypeError, match=what.format(name)):
                _step(its_model, each, rank)
    _step(other, named, rank)


@distributed(world_size=2)
def test_refused_class_in_rows(rank: int, tmp_path: Path) -> None:
    """A state of the local rows is not of the parameter's shape."""
    model = _build("rows")
    optim = Momentum(model.parameters(), Halved)
    _step(model, optim, rank)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"Momentum's state 'momentum'.*one value per"
    ):
        checkpoint.save(tmp_path / "c", model, optim)
