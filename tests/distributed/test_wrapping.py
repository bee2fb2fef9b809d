"""Which modules become units: policies, manual nesting, wrap(), ignored modules."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from helpers.distributed import distributed
from helpers.impl import FSDP, ShardingStrategy, fsdp
from helpers.models import CASES, MLP, Block, Transformer, TransformerBlock
from helpers.reference import Differential

pytestmark = pytest.mark.bookkeeping

# Of the transformer: the policy, and the modules that must become units besides
# the root.
POLICIES: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "none": (lambda: None, set()),
    "module_wrap": (
        lambda: ModuleWrapPolicy({TransformerBlock}),
        {"blocks.0", "blocks.1"},
    ),
    "transformer": (
        lambda: functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={TransformerBlock}
        ),
        {"blocks.0", "blocks.1"},
    ),
    "size_based": (
        lambda: functools.partial(size_based_auto_wrap_policy, min_num_params=300),
        {"blocks.0.mlp", "blocks.0", "blocks.1", "blocks.1.mlp"},
    ),
    "lambda": (
        lambda: functools.partial(
            lambda_auto_wrap_policy,
            lambda_fn=lambda module: isinstance(module, nn.LayerNorm),
        ),
        {
            "blocks.0.norm1",
            "blocks.0.norm2",
            "blocks.1.norm1",
            "blocks.1.norm2",
            "norm",
        },
    ),
    "custom": (
        lambda: CustomPolicy(
            lambda module: (
                {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
                if isinstance(module, TransformerBlock)
                else False
            )
        ),
        {"blocks.0", "blocks.1"},
    ),
    "function": (
        lambda: (
            lambda module, recurse, nonwrapped_numel: (
                recurse or isinstance(module, TransformerBlock)
            )
        ),
        {"blocks.0", "blocks.1"},
    ),
}


def _unit_names(model: Any) -> set[str]:
    """Return the clean names of the units, without the root's."""
    return {
        name.replace("_fsdp_wrapped_module.", "").replace("._fsdp_wrapped_module", "")
        for name, module in model.named_modules()
        if isinstance(module, FSDP) and module is not model
    }


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=(2, 3))
def test_policy(policy: str, use_orig_params: bool) -> None:
    """Every torch policy makes the units it names, and trains."""
    make, expected = POLICIES[policy]
    differential = Differential.of_case(
        CASES["transformer"],
        lambda module: fsdp(
            module, auto_wrap_policy=make(), use_orig_params=use_orig_params
        ),
        use_orig_params=use_orig_params,
    )
    names = _unit_names(differential.model)
    if policy == "size_based":  # torch decides by the numels; some must be there
        assert names & expected, names
    else:
        assert names == expected
    assert len(FSDP.fsdp_modules(differential.model)) == len(names) + 1
    differential.train(2)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3))
def test_manual_nesting(use_orig_params: bool) -> None:
    """Units inside units inside units, each with its own strategy."""

    def wrap_by_hand(model: nn.Module) -> Any:
        assert isinstance(model, MLP)
        kwargs = {"use_orig_params": use_orig_params}
        for index, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            block.fc1 = fsdp(block.fc1, **kwargs)
            if index != 1:
                model.blocks[index] = fsdp(block, strategy="SHARD_GRAD_OP", **kwargs)
        return fsdp(model, **kwargs)

    differential = Differential.of_case(
        CASES["mlp"], wrap_by_hand, use_orig_params=use_orig_params
    )
    assert _unit_names(differential.model) == {
        *(f"blocks.{i}.fc1" for i in range(3)),
        "blocks.0",
        "blocks.2",
    }
    differential.train(3)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_wrap_inside_enable_wrap(use_orig_params: bool) -> None:
    """wrap() makes a unit with the context's arguments; outside it does nothing."""

    def wrap_by_hand(model: nn.Module) -> Any:
        assert isinstance(model, MLP)
        kwargs = {"use_orig_params": use_orig_params}
        assert not isinstance(wrap(model.inp), FSDP)
        with enable_wrap(wrapper_cls=FSDP, **kwargs):
            model.blocks[0] = wrap(model.blocks[0])
            model.out = wrap(model.out)  # type: ignore[assignment]
            return wrap(model)

    differential = Differential.of_case(
        CASES["mlp"], wrap_by_hand, use_orig_params=use_orig_params
    )
    assert isinstance(differential.model, FSDP)
    assert _unit_names(differential.model) == {"blocks.0", "out"}
    differential.train(2)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_every_module_is_a_unit(use_orig_params: bool) -> None:
    """Units without parameters of their own are fine."""
    differential = Differential(
        lambda: nn.Sequential(
            nn.Linear(6, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 4), nn.GELU())
        ),
        lambda module: fsdp(
            module, auto_wrap_policy=always_wrap_policy, use_orig_params=use_orig_params
        ),
        CASES["mlp"].inputs,
        use_orig_params=use_orig_params,
    )
    assert _unit_names(differential.model) == {"0", "1", "2", "2.0", "2.1"}
    differential.train(2)


@distributed(world_size=2)
def test_model_without_parameters() -> None:
    """A model with nothing to shard runs."""
    model = fsdp(nn.Sequential(nn.Tanh(), nn.Flatten()), use_orig_params=True)
    x = torch.randn(3, 4, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert list(model.parameters()) == []


@distributed(world_size=2)
def test_ignored_modules() -> None:
    """Ignored modules keep whole parameters and local gradients."""
    torch.manual_seed(0)
    model = MLP()
    whole = model.out.weight.shape
    sharded = fsdp(
        model, units={Block}, ignored_modules=[model.out], use_orig_params=True
    )
    sharded(torch.randn(4, 6)).sum().backward()
    assert model.out.weight.shape == whole
    assert model.out.weight.grad is not None
    assert model.out.weight.grad.shape == whole


@distributed(world_size=2)
def test_repr_names_units() -> None:
    """The model prints with its units."""
    model = fsdp(Transformer(), units={TransformerBlock})
    text = repr(model)
    assert text.startswith("FullyShardedDataParallel(")
    assert "2 x FullyShardedDataParallel(" in text
    assert "TransformerBlock(" in text
