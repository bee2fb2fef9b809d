"""Memory within a step: blocks that come and go on a host, rings, kept gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import distributed
from helpers.groups import hybrid_groups
from helpers.impl import fsdp, memory_stats
from helpers.models import Block, loss_of, vectors
from helpers.seeds import generator
from helpers.transports import c10d_only, over


def _chain(depth: int, **options: Any) -> Any:
    """Return equal units below a root without parameters."""
    blocks = nn.Sequential(*(Block() for _ in range(depth)))
    return fsdp(blocks, units={Block}, use_orig_params=True, **options)


def _watch_backward(model: Any) -> list[tuple[int, int]]:
    """Return the list that gets blocks and sharded gradients in each unit's backward.

    In bytes, before its first gradient.
    """
    seen: list[tuple[int, int]] = []

    def note(_: Tensor) -> None:
        stats = memory_stats(model)
        seen.append((stats["arena_nbytes"], stats["grad_shard_nbytes"]))

    def watch(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(note)

    for block in model.module:
        block.module.fc1.register_forward_hook(watch)
    return seen


@pytest.mark.cpu_only("an accelerator takes blocks one unit ahead")
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@distributed(world_size=(2, 3))
def test_blocks_in_backward(rank: int, world_size: int, transport: str) -> None:
    """From the last unit, where activations are largest, to the first one.

    Each has its parameters. The sharded gradients of those before it are there.
    """
    depth = 6
    (x,) = vectors(generator(rank))

    def train() -> None:
        model = _chain(depth)
        shard = memory_stats(model)["shard_nbytes"] // depth
        nbytes = shard * world_size
        seen = _watch_backward(model)
        for _ in range(2):
            model.zero_grad()
            seen.clear()
            loss_of(model(x)).backward()
            assert seen == [(nbytes, n * shard) for n in range(depth)]
            assert memory_stats(model)["arena_nbytes"] == 0

    if transport == "c10d":
        with c10d_only():
            train()
    else:
        train()


@pytest.mark.cpu_only("rings are in shared memory")
@distributed(world_size=2)
def test_rings_follow_the_largest_unit(rank: int) -> None:
    """Two of a call each, at least 64 KiB; larger units on a group meet anew."""
    with over("rings"), hybrid_groups(1, 2) as (group, _):
        _train_with_rings(rank, group)


@pytest.mark.cpu_only("rings are in shared memory")
@distributed(world_size=2)
def test_rings_are_small_where_ranks_read_each_other() -> None:
    """Whatever the units, unless the system refuses."""
    with hybrid_groups(1, 2) as (group, _):
        large = fsdp(nn.Linear(1024, 512, bias=False), process_group=group)
        large(torch.ones(1, 1024)).sum().backward()
        nbytes = memory_stats(large)["ring_nbytes"]
        assert nbytes < 2**18 or nbytes >= 1024 * 512 * 4  # the system refuses


def _train_with_rings(rank: int, group: Any) -> None:
    (x,) = vectors(generator(rank))
    rest = 2**19  # rings for messages, counters

    def ring_nbytes(model: Any) -> int:
        return memory_stats(model)["ring_nbytes"]

    small = _chain(3, process_group=group)
    loss_of(small(x)).backward()
    assert 2 * 2**16 <= ring_nbytes(small) <= 2 * 2**16 + rest
    large = fsdp(nn.Linear(1024, 512, bias=False), process_group=group)
    large(torch.ones(1, 1024)).sum().backward()
    shard = 1024 * 512 * 4 // 2
    assert 2 * shard <= ring_nbytes(large) <= 2 * shard + rest
    loss_of(small(x)).backward()
    assert ring_nbytes(small) < 2 * shard


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("when", ["before forward", "before backward"])
@distributed(world_size=(2, 3))
def test_a_gradient_that_was_kept_stays(
    rank: int, when: str, use_orig_params: bool
) -> None:
    """Cleared on the parameter, it has its values after the next steps."""
    model = fsdp(
        nn.Sequential(*(Block() for _ in range(3))),
        units={Block},
        use_orig_params=use_orig_params,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rng = generator(rank)
    (x,) = vectors(rng)
    loss_of(model(x)).backward()
    for _ in range(3):
        kept = [p.grad for p in model.parameters() if p.grad is not None]
        values = [grad.clone() for grad in kept]
        assert kept
        optimizer.step()
        (x,) = vectors(rng)
        if when == "before forward":
            optimizer.zero_grad()
        loss = loss_of(model(x))
        if when == "before backward":
            optimizer.zero_grad()
        loss.backward()
        after = [p.grad for p in model.parameters() if p.grad is not None]
        for old, value, new in zip(kept, values, after, strict=True):
            assert torch.equal(old, value)
            assert new is not old
            assert new.data_ptr() != old.data_ptr()
            assert not torch.equal(new, old)
