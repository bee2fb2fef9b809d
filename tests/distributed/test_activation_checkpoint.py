"""Activation checkpointing, inside the wrapper and around it."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from helpers.distributed import STRATEGIES, distributed, every_strategy
from helpers.impl import MixedPrecision, assert_idle, fsdp, memory_stats
from helpers.models import MLP, Block, vectors
from helpers.reference import Differential
from helpers.rows import APIS, in_either_api, shard_by

# Of a step of _Model: one for forward and one for backward of each unit.
MOST_GATHERS = 2 * 3 + 1


class _CheckpointedBlock(Block):
    """A block that checkpoints itself."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


class _Model(nn.Module):
    """Blocks that are checkpointed inside their unit or around it."""

    def __init__(self, use_reentrant: bool, around: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.around = around
        self.inp = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(
            Block() if around else _CheckpointedBlock(use_reentrant) for _ in range(3)
        )
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            if self.around:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            else:
                x = block(x)
        return self.out(x)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
@distributed(world_size=(2, 3))
def test_checkpoint(use_reentrant: bool, around: bool, strategy: str, api: str) -> None:
    """torch.utils.checkpoint, both kinds, in both places."""
    differential = in_either_api(
        api, lambda: _Model(use_reentrant, around), {Block}, strategy=strategy
    )
    differential.train(2)
    differential.evaluate()
    differential.zero_grad()
    differential.accumulate(2, no_sync=True)
    differential.checked_step()


@pytest.mark.trap(7)
@pytest.mark.parametrize("forward_prefetch", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("around", [True, False])
@distributed(world_size=2)
def test_recomputation_gathers_once(
    around: bool, use_reentrant: bool, forward_prefetch: bool
) -> None:
    """Two gathers per unit, for checkpoint(unit) as for unit(checkpoint)."""
    differential = Differential.of_units(
        lambda: _Model(use_reentrant, around),
        {Block},
        forward_prefetch=forward_prefetch,
    )
    differential.train(2)
    before = memory_stats(differential.model)["num_all_gathers"]
    differential.train(1)
    num_gathers = memory_stats(differential.model)["num_all_gathers"] - before
    assert num_gathers <= MOST_GATHERS


@pytest.mark.trap(29)
@every_strategy
@pytest.mark.parametrize("frozen", [(0,), (0, 1), (1, 2)])
@distributed(world_size=(2, 3))
def test_frozen_units_under_reentrant_checkpoint(
    frozen: tuple[int, ...], strategy: str, use_orig_params: bool
) -> None:
    """Recomputing one in backward is no forward: it prefetches nothing ahead."""

    def build() -> nn.Module:
        model = _Model(use_reentrant=True, around=True)
        for index in frozen:
            model.blocks[index].requires_grad_(False)
        return model

    differential = Differential.of_units(
        build,
        {Block},
        strategy=strategy,
        use_orig_params=use_orig_params,
        forward_prefetch=True,
    )
    for _ in range(3):
        before = memory_stats(differential.model)["num_all_gathers"]
        differential.zero_grad()
        differential.forward_backward()
        assert_idle(differential.model)
        num_gathers = memory_stats(differential.model)["num_all_gathers"] - before
        assert num_gathers <= MOST_GATHERS
        differential.checked_step()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("impl", ["REENTRANT", "NO_REENTRANT"])
@pytest.mark.parametrize("how", ["inside", "around", "composable", "applied"])
@distributed(world_size=2)
def test_checkpoint_wrapper(how: str, impl: str, api: str) -> None:
    """Torch's wrappers: modules, hooks, or put in by a function after sharding."""
    checkpointed = functools.partial(
        checkpoint_wrapper, checkpoint_impl=CheckpointImpl[impl]
    )

    def shard_block(block: nn.Module) -> nn.Module:
        if how == "around":
            return checkpointed(shard_by(api, block, ()))
        if how == "composable":
            composable_checkpoint(block)
        elif how == "inside":
            block = checkpointed(block)
        return shard_by(api, block, ())

    def shard(model: Any) -> Any:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = shard_block(block)
        sharded = shard_by(api, model, ())
        if how == "applied":
            apply_activation_checkpointing(
                sharded,
                checkpoint_wrapper_fn=checkpointed,
                check_fn=lambda module: isinstance(module, Block),
            )
        return sharded

    in_either_api(api, MLP, (), shard=shard).train(3)


@pytest.mark.parametrize("use_reentrant", [True, False])
@distributed(world_size=2)
def test_part_of_a_unit(use_reentrant: bool) -> None:
    """Only some layers of a unit are recomputed; some twice, nested."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(6, 6)
            self.block = Block()
            self.deep = Block()
            self.out = nn.Linear(6, 2)

        def nested(self, x: Tensor) -> Tensor:
            x = self.block(x)
            return checkpoint(self.deep, x, use_reentrant=use_reentrant)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            x = checkpoint(self.nested, x, use_reentrant=use_reentrant)
            return self.out(x)

    def wrap(model: Any) -> Any:
        model.deep = fsdp(model.deep, use_orig_params=True)
        return fsdp(model, use_orig_params=True)

    differential = Differential(Part, wrap, vectors, use_orig_params=True)
    differential.train(3)


@pytest.mark.parametrize("needs_grad", [False, True])
@distributed(world_size=2)
def test_inputs_of_a_root_are_cast_again(needs_grad: bool) -> None:
    """A root that is recomputed gets its inputs in the dtype that forward gave them."""
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    grads = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = fsdp(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)),
            mixed_precision=precision,
            use_orig_params=True,
        )
        x = torch.randn(4, 6).requires_grad_(needs_grad)
        out = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
        assert out.dtype == torch.bfloat16
        out.float().square().mean().backward()
        grads.append([param.grad for param in model.parameters()])
    for first, second in zip(*grads, strict=True):
        assert (first is None) == (second is None)
        assert first is None or torch.equal(first, second)
