"""fp16 with torch's ShardedGradScaler: one rank's infinity is everybody's."""

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from helpers.distributed import TEST_DEVICE, distributed, every_strategy, varied
from helpers.impl import FSDP, MixedPrecision, fsdp
from helpers.models import loss_of
from helpers.reference import (
    Differential,
    assert_same_tensors,
    full_state_dict,
    objects_of_all_ranks,
    with_model,
)
from helpers.seeds import generator

RANKS = (2, 3, 4)
FP16 = MixedPrecision(torch.float16, torch.float16, cast_forward_inputs=True)


def _scaler(**kwargs: Any) -> ShardedGradScaler:
    return ShardedGradScaler(device=TEST_DEVICE, growth_interval=1000, **kwargs)


@pytest.mark.trap(23)
@every_strategy
@distributed(world_size=RANKS)
@with_model()
def test_infinity_on_one_rank_skips_the_step_everywhere(
    differential: Differential, rank: int, world_size: int
) -> None:
    """Each rank in turn: nobody steps, all scales halve alike; then all go on."""
    model, optimizer = differential.model, differential.optimizer
    scaler = _scaler(init_scale=64.0)
    scale = 64.0
    (x,) = differential.inputs(generator("scaler", rank))
    for bad_rank in range(world_size):
        before = {n: t.clone() for n, t in full_state_dict(model).items()}
        for is_bad in (True, False):
            optimizer.zero_grad()
            scaled = scaler.scale(loss_of(model(x)))
            # An infinite loss: all gradients of the bad rank are infinite or NaN.
            (scaled * (math.inf if is_bad and rank == bad_rank else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            scale *= 0.5 if is_bad else 1.0
            assert objects_of_all_ranks(scaler.get_scale()) == [scale] * world_size
            after = full_state_dict(model)
            if is_bad:
                assert_same_tensors("parameter", after, before, 0.0)
            else:
                assert any(not torch.equal(after[n], before[n]) for n in before)
                assert all(t.isfinite().all() for t in after.values())


class _OneLayer(nn.Module):
    """Two parameters of one element: of any two ranks one holds neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5]))
        self.bias = nn.Parameter(torch.tensor([0.25]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


@pytest.mark.trap(23)
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=RANKS)
def test_rank_that_holds_nothing_hears_of_it(
    world_size: int, use_orig_params: bool
) -> None:
    """Only one shard holds the infinite gradient; the others' are fine or empty."""
    model = fsdp(_OneLayer(), use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = _scaler(init_scale=8.0)
    for x, scale in ((torch.tensor([math.inf]), 4.0), (torch.ones(1), 4.0)):
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert objects_of_all_ranks(scaler.get_scale()) == [scale] * world_size
    with FSDP.summon_full_params(model):
        assert model.module.weight.item() == -0.5
        assert model.module.bias.item() == -0.75


@varied(use_orig_params=[True, False], strategy=["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("clips", [True, False])
@distributed(world_size=RANKS)
@with_model(mixed_precision=FP16, tolerance=2e-2)
def test_unscaled_gradients_equal_the_reference(
    differential: Differential, clips: bool
) -> None:
    """fp16 compute and reduction, fp32 shards; unscale, clip, step."""
    scaler = _scaler(init_scale=256.0)
    for _ in range(3):
        differential.zero_grad()
        mean, mine = differential.forward()
        mean.backward()
        scaler.scale(mine).backward()
        scaler.unscale_(differential.optimizer)
        differential.check()
        if clips:
            differential.clip(0.1)
            differential.check()
        scaler.step(differential.optimizer)
        scaler.update()
        differential.reference_optimizer.step()
        differential.check()
    assert scaler.get_scale() == 256.0


@pytest.mark.parametrize("no_sync", [True, False])
@distributed(world_size=RANKS)
@with_model(mixed_precision=FP16, tolerance=2e-2)
def test_accumulation(
    differential: Differential, rank: int, world_size: int, no_sync: bool
) -> None:
    """Micro batches under one scale; an overflow in any of them counts."""
    model = differential.model
    scaler = _scaler(init_scale=128.0)
    for bad_batch, scale in ((None, 128.0), (0, 64.0), (1, 32.0), (None, 32.0)):
        differential.zero_grad()
        for index in range(2):
            mean, mine = differential.forward()
            mean.backward()
            factor = 1e30 if index == bad_batch and rank == world_size - 1 else 1.0
            with (
                model.no_sync() if no_sync and index == 0 else contextlib.nullcontext()
            ):
                (scaler.scale(mine) * factor).backward()
        if bad_batch is None:
            scaler.unscale_(differential.optimizer)
            differential.check()
            differential.reference_optimizer.step()
        scaler.step(differential.optimizer)
        scaler.update()
        assert objects_of_all_ranks(scaler.get_scale()) == [scale] * world_size
        differential.zero_grad()
        differential.check()
