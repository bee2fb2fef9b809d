"""Traps around forward: outputs, roots, names, shared parameters, warnings.

What a number stands for is in tests/lint/test_traps.py.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from helpers.distributed import distributed, every_strategy
from helpers.impl import FSDP, fsdp
from helpers.models import DIM, MLP, Block, vectors
from helpers.reference import (
    Differential,
    assert_same_tensors,
    full_state_dict,
    with_model,
)
from helpers.rows import APIS, in_either_api


class _Recurrent(nn.Module):
    """A unit whose only output is a PackedSequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(DIM, DIM)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        return self.rnn(packed)[0]


class _RecurrentNet(nn.Module):
    """Two such units; the root returns a PackedSequence too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Recurrent() for _ in range(2))

    def forward(self, x: Tensor) -> PackedSequence:
        sequences = torch.stack([x, x.sin(), x.cos()])
        lengths = torch.tensor([3, 2, 2, 1], device="cpu")
        packed = pack_padded_sequence(sequences, lengths)
        for layer in self.layers:
            packed = layer(packed)
        return packed


@pytest.mark.trap(4)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=(2, 3))
def test_packed_sequences(api: str, strategy: str, rank: int) -> None:
    """Backward starts from the tensor inside a PackedSequence.

    The module has lists of its parameters.
    """
    both = in_either_api(api, _RecurrentNet, {_Recurrent}, strategy=strategy)
    both.train(2)
    assert type(both.model(*both.batches()[rank])) is PackedSequence


@pytest.mark.trap(6)
@pytest.mark.parametrize(
    "first", ["summon", "state_dict", "forward", "no_grad", "clip"]
)
@distributed(world_size=(2, 3))
@with_model()
def test_nested_unit_is_used_before_the_root(
    differential: Differential, first: str
) -> None:
    """Whatever a nested unit does first, it does not become the root for good."""
    block = differential.model.blocks[1]
    if first == "summon":
        with FSDP.summon_full_params(block):
            assert block.fc1.weight.shape == (10, 6)
    elif first == "state_dict":
        expected = differential.reference.get_submodule("blocks.1").state_dict()
        assert_same_tensors("state", full_state_dict(block), expected)
    elif first == "no_grad":
        with torch.no_grad():
            block(torch.randn(4, 6))
    elif first == "forward":
        block(torch.randn(4, 6)).sum().backward()
        block.zero_grad()
    else:
        block.clip_grad_norm_(1.0)
    differential.train(2)
    assert differential.model.check_is_root()
    assert not block.check_is_root()
    differential.run("znsk")


class _TiedAcross(MLP):
    """Two parameters that units and the root share."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].fc1.weight = self.blocks[0].fc1.weight
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.out.weight = self.inp.weight


@pytest.mark.trap(24)
@every_strategy
@distributed(world_size=(2, 3))
def test_parameter_shared_between_units(strategy: str, use_orig_params: bool) -> None:
    """It goes to the lowest common unit, here the root, under its first name."""
    with pytest.warns(UserWarning, match=r"shared between units: blocks\.0\.fc1\.we"):
        differential = Differential.of_units(
            _TiedAcross, {Block}, strategy=strategy, use_orig_params=use_orig_params
        )
    differential.train(3)
    state = full_state_dict(differential.model)
    expected = differential.reference.state_dict()
    assert list(state) == list(expected)
    assert_same_tensors("state", state, expected)
    model = differential.model
    assert model.out.weight is model.inp.weight
    assert model.blocks[2].fc1.weight is model.blocks[0].fc1.weight


@pytest.mark.trap(17)
@pytest.mark.parametrize("groups", ["by_name", "before_wrapping"])
@distributed(world_size=(2, 3))
def test_weight_decay_groups(groups: str) -> None:
    """Groups built by name, or by the number of dimensions before wrapping."""

    def optimizer(decays: list[Tensor], others: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": decays, "weight_decay": 0.5},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=0.05,
            eps=1e-4,
        )

    def by_name(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        return optimizer(
            [p for n, p in named if not n.endswith("bias")],
            [p for n, p in named if n.endswith("bias")],
        )

    def by_dim(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        return optimizer(
            [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
        )

    made = []

    def wrap(module: nn.Module) -> Any:
        if groups == "before_wrapping":
            made.append(by_dim(module))
        return fsdp(module, use_orig_params=True)

    differential = Differential(
        lambda: MLP(2), wrap, vectors, use_orig_params=True, tolerance=1e-3
    )
    differential.reference_optimizer = by_dim(differential.reference)
    differential.optimizer = made[0] if made else by_name(differential.model)
    differential.train(3)


@pytest.mark.trap(31)
@distributed(world_size=2)
def test_nothing_warns() -> None:
    """No deprecated collective is called in a step, a state dict or a summon."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        differential = Differential.of_model("transformer")
        differential.train(2)
        differential.run("znsk")
        state = full_state_dict(differential.model)
        differential.model.load_state_dict(state)
        with FSDP.summon_full_params(differential.model):
            pass
