"""The walk of a module tree that state dicts begin with."""

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

from fsdp_c import FullyShardedDataParallel
from fsdp_c._units.tree import Tree
from helpers.distributed import distributed

pytestmark = pytest.mark.bookkeeping


@distributed(world_size=1)
def test_places(rank: int) -> None:
    """Each module is in its innermost unit, and has all names of the bare model."""
    twice = nn.Linear(2, 2)
    inner = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2), twice))
    nested = nn.ModuleDict({"a": checkpoint_wrapper(inner), "b": inner})
    other = nn.Linear(2, 2)
    model = nn.ModuleDict({"nested": nested, "x": other, "y": other})
    outer = FullyShardedDataParallel(model)
    tree = Tree.of(outer)
    first = "nested.a._checkpoint_wrapped_module."
    assert tree.prefixes == {outer: "", inner: first}
    assert tree.modules == [outer, inner]
    assert set(tree.own[inner]) == {inner.wrapped, *inner.wrapped}
    assert set(tree.own[outer]) == {model, nested, nested["a"], other}
    assert tree.places[twice] == ["nested.a.1.", "nested.b.1."]
    names = [name for name, _ in tree.named_uses(inner)]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    uses = [(name, use.slot) for name, use in tree.named_uses(outer)]
    assert uses == [("x.weight", 0), ("y.weight", 0), ("x.bias", 1), ("y.bias", 1)]
