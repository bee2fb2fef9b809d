"""fully_shard: parameters that are tied after it, over several of its calls.

As transformers does with `distributed_config`: it shards a model, then reads the
weights, then ties embedding and head. `Rows` compares with a model that was never
sharded, tied from the beginning.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from fsdp_c import FSDPModule, MixedPrecisionPolicy, checkpoint, fully_shard
from helpers.distributed import TEST_DEVICE, distributed
from helpers.models import DIM, VOCAB, tokens
from helpers.rows import Rows, small_apart
from helpers.shared_folder import shared_folder


class Language(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.last = nn.Linear(DIM, DIM)  # behind the tied parameter, run before it

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.emb(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        out: Tensor = self.head(self.last(self.norm(hidden)))
        return out


def tie(model: Any) -> Any:
    model.head.weight = model.emb.weight
    return model


def untied(model: Any) -> Any:
    """Give the head a weight of its own, which a later tie drops."""
    model.head.weight = nn.Parameter(torch.zeros_like(model.emb.weight))
    return model


def shard_inside(model: Any, *inside: Any, reshards: bool = True) -> Any:
    for block in model.blocks:
        fully_shard(block)
    for each in inside:
        fully_shard(each, reshard_after_forward=reshards)
    return fully_shard(model)


# What is a call of its own beside the root, and the blocks.
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "nothing": fully_shard,
    "embedding": lambda model: shard_inside(model, model.emb),
    "head": lambda model: shard_inside(model, model.head),
    "both": lambda model: shard_inside(model, model.emb, model.head),
    "norm and embedding": lambda model: shard_inside(
        model, [model.norm, model.emb], reshards=False
    ),
}


def rows(layout: str) -> Rows:
    return Rows(
        lambda: tie(Language()),
        lambda model: tie(LAYOUTS[layout](untied(model))),
        tokens,
    )


@pytest.mark.parametrize("are_apart", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(world_size=2)
def test_training(layout: str, are_apart: bool) -> None:
    with small_apart() if are_apart else contextlib.nullcontext():
        both = rows(layout)
    both.train(3)
    model = both.model
    assert model.head.weight is model.emb.weight
    assert isinstance(model.head.weight, DTensor)
    state = get_model_state_dict(model)
    assert {"emb.weight", "head.weight"} <= set(state)
    with torch.no_grad():
        model(*tokens(torch.Generator(TEST_DEVICE)))
    both.train(1)


@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(world_size=2)
def test_a_module_that_ran_alone(layout: str) -> None:
    """Its unit is made again, with the parameters that it has then."""
    both = rows(layout)
    with torch.no_grad():
        if isinstance(both.model.emb, FSDPModule):
            both.model.emb(torch.zeros(1, dtype=torch.int64))
        if isinstance(both.model.head, FSDPModule):
            both.model.head(torch.zeros(1, DIM, dtype=torch.float64))
    both.train(2)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(world_size=2)
def test_checkpoint_before_the_first_forward(layout: str, has_run: bool) -> None:
    """Its names are those of a model that has run; the tied one is not the last."""
    saved, loaded = rows(layout), rows(layout)
    if has_run:
        loaded.train(1)
    loaded.reference.load_state_dict(saved.reference.state_dict())
    with shared_folder() as folder:
        checkpoint.save(folder / "here", saved.model)
        checkpoint.load(folder / "here", loaded.model)
    saved.train(1)
    loaded.train(2)


@distributed(world_size=2)
def test_another_precision_is_refused() -> None:
    model: Any = Language()
    fully_shard(model.emb, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    tie(fully_shard(model))
    with pytest.raises(
        ValueError,
        match=r"'head\.weight' of Language and 'weight' of Embedding were tied after",
    ):
        model(*tokens(torch.Generator(TEST_DEVICE)))


@pytest.mark.parametrize("layout", ["nothing", "embedding"])
@distributed(world_size=2)
def test_a_tie_after_a_forward_is_refused(layout: str) -> None:
    model = LAYOUTS[layout](Language())
    with torch.no_grad():
        model(*tokens(torch.Generator(TEST_DEVICE)))
    tie(model)
    with pytest.raises(ValueError, match=r"'head\.weight' of Language was tied"):
        model(*tokens(torch.Generator(TEST_DEVICE)))
