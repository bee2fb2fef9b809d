"""Arguments of the constructor: sync_module_states, device_id, process_group, ..."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import first_ranks
from helpers.impl import ShardingStrategy, fsdp
from helpers.models import (
    CASES,
    MLP,
    Block,
    Transformer,
    TransformerBlock,
    loss_of,
    tokens,
)
from helpers.reference import Differential, assert_same_tensors, full_state_dict
from helpers.rows import in_either_api


@pytest.mark.trap(27)
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3))
def test_sync_module_states(rank: int, use_orig_params: bool) -> None:
    """Parameters and buffers of rank 0 are everybody's."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(MLP(2), nn.BatchNorm1d(3))
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.add_(seed)
        return model

    expected = build(0).state_dict()
    model = fsdp(
        build(rank),
        units={Block},
        sync_module_states=True,
        use_orig_params=use_orig_params,
    )
    assert_same_tensors("state", full_state_dict(model), expected, 0.0)


@distributed(world_size=2)
def test_states_are_not_synced_by_default(rank: int) -> None:
    """Each rank brings its own part."""
    model = nn.Linear(16, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    state = full_state_dict(fsdp(model, use_orig_params=True))
    assert state["weight"].flatten().tolist() == [0.0] * 8 + [1.0] * 8


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("device_id", [None, "device"])
@distributed(world_size=2)
def test_device_id(device_id: str | None, use_orig_params: bool) -> None:
    """The device under test, named and not."""
    named = {} if device_id is None else {"device_id": torch.device(TEST_DEVICE)}
    Differential.of_model("mlp", use_orig_params=use_orig_params, **named).train(2)


@distributed(world_size=3)
def test_process_group(rank: int) -> None:
    """Sharding over a part of the ranks: those are the data-parallel ones."""
    with first_ranks(2) as group:
        if group is None:
            return
        torch.manual_seed(3)
        reference = MLP()
        model = fsdp(
            copy.deepcopy(reference),
            process_group=group,
            units={Block},
            use_orig_params=True,
        )
        batches = [torch.randn(4, 6) for _ in range(2)]
        for batch in batches:
            (loss_of(reference(batch)) / 2).backward()
        loss_of(model(batches[rank])).backward()
        assert model.process_group is group
        assert model.world_size == 2
        assert model.rank == rank
        for param, expected in zip(
            model.parameters(), reference.parameters(), strict=True
        ):
            pieces: list[Any] = [None, None]
            dist.all_gather_object(pieces, param.grad, group=group)
            whole = torch.cat([p.flatten() for p in pieces if p is not None])
            assert expected.grad is not None
            torch.testing.assert_close(whole.view_as(expected), expected.grad)
        del model


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_single_rank_group(rank: int, world_size: int, use_orig_params: bool) -> None:
    """A group of one rank is plain training."""
    groups = [dist.new_group([r]) for r in range(world_size)]
    torch.manual_seed(0)
    reference = MLP()
    model = fsdp(
        copy.deepcopy(reference),
        process_group=groups[rank],
        units={Block},
        use_orig_params=use_orig_params,
    )
    batch = torch.randn(4, 6) + rank
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for _ in range(3):
        losses = [loss_of(module(batch)) for module in (model, reference)]
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_same_tensors("state", full_state_dict(model), reference.state_dict())
    del model, losses, loss, optimizer, optimizers
    gc.collect()
    dist.barrier()
    dist.destroy_process_group(groups[rank])


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_original_memory_is_freed(world_size: int, use_orig_params: bool) -> None:
    """Between steps a rank holds its shard, not the whole parameter."""
    model = nn.Linear(64, 64, bias=False)
    sharded = fsdp(model, use_orig_params=use_orig_params)
    nbytes = sum(p.untyped_storage().nbytes() for p in sharded.parameters())
    assert nbytes == 64 * 64 * 4 // world_size
    sharded(torch.randn(2, 64)).sum().backward()
    nbytes = sum(p.untyped_storage().nbytes() for p in sharded.parameters())
    assert nbytes == 64 * 64 * 4 // world_size


@distributed(world_size=2)
def test_parameters_keep_their_identity() -> None:
    """With use_orig_params the parameters are the user's own objects, always."""
    model = MLP()
    before = [id(p) for p in model.parameters()]
    sharded = fsdp(model, units={Block}, use_orig_params=True)
    assert [id(p) for p in sharded.parameters()] == before
    sharded(torch.randn(4, 6)).sum().backward()
    assert [id(p) for p in sharded.parameters()] == before
    assert all(isinstance(p, nn.Parameter) for p in sharded.parameters())


@pytest.mark.parametrize("api", ["FSDP", "FSDP flat", "fully_shard"])
@distributed(world_size=2)
def test_model_is_freed(api: str) -> None:
    """A trained model goes away with its last reference, with its parameters."""
    both = in_either_api(api, Transformer, {TransformerBlock}, tokens)
    both.train(1)
    model: Any = both.model
    objects = [*model.modules(), *model.parameters()]
    objects += getattr(model, "_fsdp_c_groups", [])
    references = [weakref.ref(each) for each in objects]
    del both, model, objects
    gc.collect()
    assert [r() for r in references] == [None] * len(references)


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=2)
def test_models_side_by_side(api: str) -> None:
    """Two roots, stepped in turn, as for a GAN; one dies in between."""
    first, second = (
        in_either_api(api, CASES[name].build, {Block})
        for name in ("mlp", "called_twice")
    )
    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        losses = [first.forward(), second.forward()]
        for mean, mine in losses:
            mean.backward()
            mine.backward()
        for differential in (first, second):
            differential.checked_step()
    del first, differential, losses, mean, mine
    gc.collect()
    second.train(1)


@distributed(world_size=2)
def test_strategy_shows(rank: int, world_size: int) -> None:
    """Attributes that users of FSDP1 read."""
    model = fsdp(MLP(), units={Block}, strategy="SHARD_GRAD_OP")
    assert model.sharding_strategy == ShardingStrategy.SHARD_GRAD_OP
    assert model.blocks[0].sharding_strategy == ShardingStrategy.SHARD_GRAD_OP
    assert model.world_size == world_size
    assert model.rank == rank
    model(torch.randn(4, 6))
    assert model.check_is_root()
    assert not model.blocks[0].check_is_root()
