"""register_forward_method: other methods than forward run with whole parameters."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_c
from fsdp_c import fully_shard, register_fsdp_forward_method
from helpers.distributed import distributed
from helpers.impl import FSDP, MixedPrecision, fsdp
from helpers.models import Block
from helpers.rows import APIS, in_either_api, shard_by

register: Any = fsdp_c.register_forward_method


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)

    def look_up(self, ids: Tensor) -> Tensor:
        return self.table(ids)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dim() != 1:
            raise ValueError("one sequence, please")
        return self.look_up(ids)


class Reader(nn.Module):
    """Calls a unit, or a method of it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()
        self.out = nn.Linear(6, 2)

    def forward(self, ids: Tensor, calls: bool) -> Tensor:
        return self.out(self.tokens(ids) if calls else self.tokens.look_up(ids))


class Coder(nn.Module):
    """A module that is run by two methods besides forward."""

    size = 3

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Block()
        self.decoder = Block()
        self.gain = nn.Parameter(torch.tensor([1.5, -0.5, 1.0]))

    def encode(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        assert self.gain.shape == (3,)
        return {"code": self.encoder(x) * self.gain.repeat(2) * scale}

    def decode(self, code: dict[str, Tensor]) -> Tensor:
        return self.decoder(code["code"])

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        yield self.encode(x)["code"]

    async def wait(self, x: Tensor) -> Tensor:
        return self.encode(x)["code"]


def _methods(model: Any, x: Tensor) -> Tensor:
    """Run them, forward too, so that each unit runs in several calls."""
    code = model.encode(x, scale=0.5)
    return model.decode(code).square().mean() + model(x).square().mean()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("units", [(), (Block,)])
@distributed(world_size=(2, 3, 4))
def test_training(units: Any, api: str) -> None:
    """Losses and weights are those of the unsharded model."""
    both = in_either_api(api, Coder, units)
    for name in ("encode", "decode"):
        if api == "fully_shard":
            register_fsdp_forward_method(both.model, name)
            register_fsdp_forward_method(nn.Linear(2, 2), name)  # nothing happens
        else:
            register(both.model, name)
    both.train_on(_methods)


@distributed(world_size=2)
def test_nested_unit() -> None:
    """A parent's forward calls the registered method of a unit inside it."""

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.coder = fsdp(Coder(), use_orig_params=True)
            register(self.coder, "encode")
            self.out = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.coder.encode(x)["code"])

    torch.manual_seed(0)
    model = fsdp(Parent(), use_orig_params=True)
    model(torch.randn(4, 6)).sum().backward()
    with FSDP.summon_full_params(model):
        assert model.coder.gain.shape == (3,)
    for name, param in model.named_parameters():
        if "decoder" in name:
            assert param.grad is None or not param.grad.any(), name
        elif param.numel() > 0:
            assert param.grad is not None, name


@distributed(world_size=2)
def test_inputs_are_cast() -> None:
    """As forward casts them."""
    model = fsdp(Coder(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    register(model, "encode")
    assert model.encode(torch.randn(4, 6))["code"].dtype == torch.bfloat16


@distributed(world_size=2)
def test_without_registration() -> None:
    """The method sees the shards; other attributes are looked up as before."""
    model = fsdp(Coder(), use_orig_params=True)
    with pytest.raises((AssertionError, RuntimeError)):
        model.encode(torch.randn(4, 6))
    register(model, "encode")
    model.encode(torch.randn(4, 6))
    assert model.size == 3
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_who_reads_shards_is_named(api: str) -> None:
    """In a note, where the unit was not called; what it raises itself has none."""
    model = shard_by(api, Reader(), {Tokens})
    tokens = model.tokens
    ids = torch.tensor([1, 2, 3])
    for _ in range(2):  # the second time of another step
        with pytest.raises(RuntimeError) as caught:
            model(ids, calls=False)
        (note,) = caught.value.__notes__
        assert "Embedding 'table' ran with shards: unit 'tokens' gathers" in note
        remedy = "register_fsdp_forward" if api == "fully_shard" else "register_forward"
        assert remedy in note
        with pytest.raises(ValueError, match="one sequence") as told:
            model(ids.unsqueeze(0), calls=True)
        assert not hasattr(told.value, "__notes__")
        other = {"tokens.table.weight": torch.zeros(5, 6)}
        if api != "FSDP flat":  # which has no parameter of that name
            with pytest.raises(RuntimeError, match="no parameter now") as refused:
                torch.func.functional_call(model, other, (ids,), {"calls": True})
            assert not hasattr(refused.value, "__notes__")
        model(ids, calls=True).sum().backward()
    if api == "fully_shard":
        register_fsdp_forward_method(tokens, "look_up")
    else:
        register(tokens, "look_up")
    model(ids, calls=False).sum().backward()


@distributed(world_size=2)
def test_errors() -> None:
    """Every message names what was given."""
    model = fsdp(Coder(), use_orig_params=True)
    rows: list[tuple[Any, Any, type[Exception], str]] = [
        (Coder(), "encode", TypeError, "Coder"),
        (fully_shard(Coder()), "encode", TypeError, "register_fsdp_forward_method"),
        (model, 3, TypeError, "method_name"),
        (model, "size", TypeError, "size.*int"),
        (model, "encoder", TypeError, "encoder.*Block"),
        (model, "translate", AttributeError, "translate"),
        (model, "forward", ValueError, "forward"),
        (model, "state_dict", ValueError, "state_dict"),
        (model, "stream", ValueError, "stream"),
        (model, "wait", ValueError, "wait"),
    ]
    for module, name, exception, part in rows:
        with pytest.raises(exception, match=part):
            register(module, name)
