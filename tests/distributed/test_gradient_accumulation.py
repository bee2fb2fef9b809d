"""Several backwards before a step: no_sync, accumulation outside it, both."""

from typing import Any

import pytest
import torch

from helpers.distributed import distributed
from helpers.impl import needs_fsdp_c
from helpers.reference import Differential

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


@pytest.mark.trap(10)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["mlp", "uneven", "called_twice", "unused"])
@distributed(world_size=(2, 3))
def test_no_sync(
    rank: int, world_size: int, model: str, strategy: str, use_orig_params: bool
) -> None:
    """Two or three micro batches without communication, then a synced one."""
    differential = Differential.of_model(
        model, strategy=strategy, use_orig_params=use_orig_params
    )
    for num_micro_batches in (3, 2, 1, 4):
        differential.zero_grad()
        differential.accumulate(num_micro_batches, no_sync=True)
        differential.check()
        differential.step()
        differential.check()


@pytest.mark.trap(11)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=(2, 3))
def test_outside_no_sync(
    rank: int, world_size: int, strategy: str, use_orig_params: bool
) -> None:
    """Every backward reduces and adds to the sharded gradient."""
    differential = Differential.of_model(
        "mlp", strategy=strategy, use_orig_params=use_orig_params
    )
    for _ in range(2):
        differential.zero_grad()
        for _ in range(3):
            differential.forward_backward()
            differential.check()
        differential.step()
        differential.check()


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=2)
def test_load_between(
    rank: int, world_size: int, strategy: str, use_orig_params: bool
) -> None:
    """Weights loaded between micro batches, also where a rank's part is empty."""
    differential = Differential.of_model(
        "uneven", strategy=strategy, use_orig_params=use_orig_params
    )
    state = {
        name: value * 0.5 for name, value in differential.reference.state_dict().items()
    }
    differential.zero_grad()
    with differential.model.no_sync():
        differential.forward_backward()
    differential.model.load_state_dict(state)
    differential.reference.load_state_dict(state)
    differential.forward_backward()
    differential.check()


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(world_size=2)
def test_zero_grad_between(
    rank: int, world_size: int, set_to_none: bool, use_orig_params: bool
) -> None:
    """Both ways to clear gradients, between synced steps."""
    differential = Differential.of_model("mlp", use_orig_params=use_orig_params)
    for num_micro_batches in (2, 1, 3):
        differential.zero_grad(set_to_none=set_to_none)
        differential.accumulate(num_micro_batches, no_sync=True)
        differential.check()
        differential.step()
        differential.check()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_zero_grad_drops_unsynced_gradients(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    """Gradients of no_sync that are cleared do not come back."""
    differential = Differential.of_model("mlp", use_orig_params=use_orig_params)
    for _ in range(2):
        differential.zero_grad()
        with differential.model.no_sync():
            differential.forward_backward()
        differential.zero_grad()
        differential.forward_backward()
        differential.check()
        differential.step()
        differential.check()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_synced_then_unsynced_then_synced(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    """A sharded gradient, an unsharded one on top, and a reduction of both."""
    differential = Differential.of_model("mlp", use_orig_params=use_orig_params)
    differential.forward_backward()
    differential.check()
    with differential.model.no_sync():
        differential.forward_backward()
    differential.forward_backward()
    differential.check()
    differential.step()
    differential.check()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_other_units_in_each_micro_batch(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    """What only a no_sync micro batch touched is reduced in the end."""
    needs_fsdp_c("asserts when a unit with unsynced gradients is skipped")
    differential = Differential.of_model("mlp", use_orig_params=use_orig_params)
    for skipped in (1, 0, 2):
        differential.zero_grad()
        with differential.model.no_sync():
            differential.forward_backward()
        both: tuple[Any, ...] = (differential.reference, differential.model)
        blocks = [model.blocks[skipped] for model in both]
        for block in blocks:
            block.forward = torch.nn.Identity().forward
        differential.forward_backward()
        for block in blocks:
            del block.forward
        # The reference reduces what no_sync left; so must the sharded model, once
        # the unit takes part in a synced backward again.
        differential.forward_backward()
        differential.check()
        differential.step()


@distributed(world_size=2)
def test_no_sync_does_not_communicate_gradients(rank: int, world_size: int) -> None:
    """Inside no_sync the ranks' gradients stay their own; exceptions end it."""
    differential = Differential.of_model("mlp", strategy="NO_SHARD")
    model = differential.model
    (batch,) = differential.batches()[rank]
    with model.no_sync():
        model(batch).sum().backward()
    mine = torch.cat([p.grad.flatten() for p in model.parameters()])
    other = [torch.zeros_like(mine) for _ in range(world_size)]
    torch.distributed.all_gather(other, mine)
    assert not torch.equal(other[0], other[1])
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    differential.zero_grad()
    differential.forward_backward()
    differential.check()
