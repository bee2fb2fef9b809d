"""Units apart: large parameters of a module that has units inside."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)

import fsdp_c
from fsdp_c import fully_shard
from fsdp_c._engines.models import units_in
from fsdp_c._units.apart import MIN_NUMEL, MOST, choose_apart
from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import kept_mesh
from helpers.models import Inputs
from helpers.rows import Rows, small_apart

VOCABULARY, WIDTH = 12, 6
APART = ["embed.weight", "norm.weight", "norm.bias", "head.weight", "other.weight"]


class Heads(nn.Module):
    """An embedding, layers that are units, a norm and two heads.

    Which head a rank uses is a part of its batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.other = nn.Linear(WIDTH, 5, bias=False)

    def forward(self, tokens: Tensor, uses: str) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = self.norm(x)
        heads = {"head": [self.head], "other": [self.other]}
        both = [self.head, self.other]
        return torch.stack(
            [0.1 * h(x).square().mean(-1) for h in heads.get(uses, both)]
        )


def shard(model: nn.Module, **options: Any) -> Any:
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)
    with small_apart():
        return fully_shard(model, **options)


class Uses:
    """Makes batches; the ranks of one use the heads that it says, in turn."""

    def __init__(self) -> None:
        self.heads = ["both"]
        self._num_calls = 0

    def __call__(self, generator: torch.Generator) -> Inputs:
        tokens = torch.randint(VOCABULARY, (4, 3), generator=generator)
        uses = self.heads[self._num_calls % len(self.heads)]
        self._num_calls += 1
        return tokens.to(TEST_DEVICE), uses  # type: ignore[return-value]


class HeadRows(Rows):
    """The inputs have a word, which has no dtype."""

    def __init__(self, **options: Any) -> None:
        self.uses = Uses()
        super().__init__(Heads, lambda model: shard(model, **options), self.uses)
        self.inputs = self.uses

    def steps(self, *heads: str) -> None:
        """Train two steps in which the ranks use these heads, in turn."""
        self.uses.heads = list(heads)
        self.uses._num_calls = 0
        self.train(2)


def num_reduces(model: nn.Module) -> int:
    return fsdp_c.memory_stats(model)["num_reduces"]


@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@distributed(world_size=(2, 3))
def test_training(reshard_after_forward: bool | None) -> None:
    """Each rank's gradients in the same places, then in others."""
    rows = HeadRows(reshard_after_forward=reshard_after_forward)
    rows.steps("both")
    rows.steps("both")
    rows.steps("head")
    rows.evaluate()
    rows.steps("both")


@distributed(world_size=2)
def test_ranks_with_other_heads() -> None:
    """One rank has a gradient of a unit, or another one has."""
    rows = HeadRows()
    for heads in (
        ("head", "other"),
        ("both", "both"),
        ("other", "head"),
        ("both", "head"),
        ("other", "other"),
        ("both", "both"),
    ):
        rows.steps(*heads)


@distributed(world_size=4)
def test_replicas() -> None:
    rows = HeadRows(mesh=kept_mesh((2, 2), ("replicate", "shard")))
    rows.steps("both")
    rows.steps("head", "other", "both", "other")
    rows.accumulate(2, no_sync=True)
    rows.checked_step()


@distributed(world_size=2)
def test_accumulation() -> None:
    rows = HeadRows()
    rows.steps("both")
    rows.run("znnsu znnsu")
    rows.model.set_requires_gradient_sync(False, recurse=False)
    rows.zero_grad()
    rows.forward_backward()
    rows.model.set_requires_gradient_sync(True, recurse=False)
    rows.forward_backward()
    rows.checked_step()


@distributed(world_size=2)
def test_memory() -> None:
    """Parameters go when their gradient is there; a block is one parameter's."""
    model = shard(Heads().to(TEST_DEVICE))
    tokens = torch.zeros(2, 3, dtype=torch.long, device=TEST_DEVICE)
    states: list[list[str]] = []

    def note(_grad: Tensor) -> None:
        units = (group.unit for group in model._fsdp_c_groups)
        states.append([unit.state for unit in units if unit is not None])

    def watch(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(note)

    model.norm.register_forward_hook(watch)
    for _ in range(3):
        before = num_reduces(model)
        states.clear()
        model(tokens, "both").sum().backward()
        assert num_reduces(model) - before == 3 + 1 + MOST
        # The main unit with the embedding, the norm's two, and the heads.
        assert states == [["UNSHARDED"] * 3 + ["SHARDED"] * 2], states
        model.zero_grad()


@distributed(world_size=2)
def test_names_and_tools() -> None:
    """Units have the names of their parameters; state dicts do not see them."""
    plain = Heads()
    names = list(plain.state_dict())
    model = shard(plain.to(TEST_DEVICE))
    tokens = torch.zeros(2, 3, dtype=torch.long, device=TEST_DEVICE)
    model(tokens, "both").sum().backward()
    units = [unit.name for unit in units_in(model)]
    assert units == ["", *APART[-MOST:], "layers.0", "layers.1", "layers.2"]
    assert list(model.state_dict()) == names
    options = StateDictOptions(full_state_dict=True)
    assert sorted(get_model_state_dict(model, options=options)) == sorted(names)
    assert "head.weight" in str(fsdp_c.explain(model))


@distributed(world_size=2)
def test_settings_of_the_module() -> None:
    """What is set on the module is set on all its units, collectives included."""
    model = shard(Heads().to(TEST_DEVICE))
    tokens = torch.zeros(2, 3, dtype=torch.long, device=TEST_DEVICE)
    seen: list[int] = []
    model.set_all_reduce_hook(lambda grads: seen.append(grads.numel()))
    model(tokens, "both").sum().backward()
    assert len(seen) == 1 + MOST
    handle = model.unshard(async_op=True)
    handle.wait()
    assert model.head.weight.shape == (VOCABULARY, WIDTH)
    assert type(model.head.weight) is nn.Parameter
    model.reshard()
    assert type(model.head.weight) is not nn.Parameter


@distributed(world_size=2)
def test_which_are_apart() -> None:
    """Only of a module that has units inside, and only large ones."""
    with small_apart():
        alone = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        assert len(alone._fsdp_c_groups) == 1
    model = Heads()
    for layer in model.layers:
        fully_shard(layer)
    assert len(fully_shard(model)._fsdp_c_groups) == 1
    frozen = Heads()
    frozen.requires_grad_(False)
    frozen.layers.requires_grad_(True)
    assert len(shard(frozen)._fsdp_c_groups) == 1
    assert dist.get_world_size() == 2


def check(numels: list[int], expected: list[int]) -> None:
    assert choose_apart(numels) == expected


def test_choose_apart() -> None:
    large = MIN_NUMEL
    check([], [])
    check([large], [])
    check([large, 5], [])
    check([large, 5, large], [0, 2])
    check([large, large], [1])  # the first is the main unit
    check([5, *[large] * (MOST + 2)], list(range(3, 3 + MOST)))
    check([large, 0, large], [0, 2])
