"""Memory in bytes, against arithmetic written here.

A unit's segments, one per (dtype, requires_grad), hold each parameter at a multiple of
16 bytes, in the smallest dtype of the unit; shards are equal and of whole such steps.
A block holds the unsharded segments, each from a multiple of 256 bytes on; a block of
gradients has a second place for each of them, which gloo's reduction needs.
"""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers.distributed import distributed
from helpers.impl import (
    IS_TORCH,
    BackwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
    fsdp,
    needs_fsdp_c,
)
from helpers.models import CASES, Block, loss_of, vectors
from helpers.seeds import generator

ALIGNMENT_NBYTES = 16
SEGMENT_ALIGNMENT_NBYTES = 256
KEYS = {
    "num_clients",
    "num_blocks",
    "arena_nbytes",
    "held_nbytes",
    "peak_nbytes",
    "num_allocs",
    "num_frees",
    "num_units",
    "shard_nbytes",
    "grad_shard_nbytes",
    "num_iterations",
    "num_all_gathers",
    "num_reduces",
    "num_prefetches",
}


def _memory_stats(model: Any) -> dict[str, int]:
    needs_fsdp_c("has no memory_stats")
    if IS_TORCH:
        return {}
    import fsdp_c

    stats: dict[str, int] = fsdp_c.memory_stats(model)
    return stats


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _shards(
    params: Iterable[Tensor], world_size: int, smallest_itemsize: int = 4
) -> dict[tuple[torch.dtype, bool], int]:
    """Return the bytes of a shard of each segment, by (dtype, requires_grad)."""
    params = list(params)
    smallest = min([smallest_itemsize, *(p.element_size() for p in params)])
    alignment = ALIGNMENT_NBYTES // smallest
    numels: dict[tuple[torch.dtype, bool], int] = {}
    for param in params:
        key = (param.dtype, param.requires_grad)
        numels[key] = numels.get(key, 0) + _round_up(param.numel(), alignment)
    return {
        (dtype, trains): _round_up(-(-numel // world_size), alignment) * dtype.itemsize
        for (dtype, trains), numel in numels.items()
    }


def _shard_nbytes(params: Iterable[Tensor], world_size: int) -> int:
    return sum(_shards(params, world_size).values())


def _block_nbytes(
    params: Iterable[Tensor], world_size: int, itemsize: int = 4
) -> tuple[int, int]:
    """Return the bytes of a block of parameters and of one of gradients.

    For a unit of one fp32 segment that is unsharded in a dtype of ``itemsize``.
    """
    ((_, shard),) = _shards(params, world_size, itemsize).items()
    unsharded = shard * world_size // 4 * itemsize
    return unsharded, _round_up(unsharded, SEGMENT_ALIGNMENT_NBYTES) + unsharded


def _step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    optimizer.step()


class _Chain(nn.Module):
    """Equal units, nothing else."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, 10) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _chain(num_blocks: int, **kwargs: Any) -> Any:
    needs_fsdp_c("has no memory_stats")
    return fsdp(
        _Chain(num_blocks),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        **kwargs,
    )


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(
    "model", ["mlp", "uneven", "tied", "frozen", "mixed_dtype", "scalar"]
)
@distributed(world_size=(2, 3))
def test_shards(rank: int, world_size: int, model: str, use_orig_params: bool) -> None:
    """One unit: the shard of each segment, and gradients of the trainable ones."""
    case = CASES[model]
    module = case.build()
    shards = _shards(module.parameters(), world_size)
    needs_fsdp_c("has no memory_stats")
    sharded = fsdp(module, use_orig_params=use_orig_params)
    stats = _memory_stats(sharded)
    assert set(stats) >= KEYS
    assert stats["num_units"] == 1
    assert stats["shard_nbytes"] == sum(shards.values())
    loss_of(sharded(*case.inputs(generator(rank)))).backward()
    trainable = sum(nbytes for (_, trains), nbytes in shards.items() if trains)
    assert _memory_stats(sharded)["grad_shard_nbytes"] == trainable


@distributed(world_size=(2, 3))
def test_shards_of_several_units(rank: int, world_size: int) -> None:
    """Units do not share padding."""
    needs_fsdp_c("has no memory_stats")
    model = CASES["mlp"].build()
    block = list(Block().parameters())
    root = [p for n, p in model.named_parameters() if "blocks" not in n]
    expected = 3 * _shard_nbytes(block, world_size) + _shard_nbytes(root, world_size)
    sharded = fsdp(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
    )
    stats = _memory_stats(sharded)
    assert stats["num_units"] == 4
    assert stats["shard_nbytes"] == expected


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(world_size=2)
def test_no_allocation_after_the_second_step(
    rank: int, world_size: int, set_to_none: bool, strategy: str
) -> None:
    """And nothing is held between steps."""
    model = _chain(5, sharding_strategy=ShardingStrategy[strategy])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    (x,) = vectors(generator(rank))
    for _ in range(2):
        _step(model, optimizer, x)
    before = _memory_stats(model)
    assert before["held_nbytes"] == 0
    for step in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model(x)).backward()
        stats = _memory_stats(model)
        assert stats["held_nbytes"] == 0, step
        optimizer.step()
        for key in ("num_allocs", "num_frees", "arena_nbytes", "num_blocks"):
            assert stats[key] == before[key], (key, step)
        assert stats["grad_shard_nbytes"] == before["grad_shard_nbytes"], step
        assert stats["num_iterations"] == before["num_iterations"] + step + 1


@pytest.mark.trap(8)
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST", None])
@distributed(world_size=(2, 3))
def test_arena_of_equal_units(rank: int, world_size: int, prefetch: str | None) -> None:
    """The arena does not grow with the depth: FULL_SHARD needs four blocks.

    Two for parameters (the unit that computes and the next one) and two for
    gradients (those that come and those on the reduce lane).
    """
    param_nbytes, grad_nbytes = _block_nbytes(Block(6, 10).parameters(), world_size)
    (x,) = vectors(generator(rank))
    for depth in (4, 9):
        model = _chain(depth, backward_prefetch=prefetch and BackwardPrefetch[prefetch])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            _step(model, optimizer, x)
        stats = _memory_stats(model)
        assert stats["num_clients"] == 2 * depth
        assert stats["num_blocks"] == 4
        assert stats["arena_nbytes"] == 2 * param_nbytes + 2 * grad_nbytes


@pytest.mark.trap(8)
@distributed(world_size=2)
def test_arena_of_shard_grad_op(rank: int, world_size: int) -> None:
    """Parameters stay unsharded from forward to backward: one block per unit more."""
    param_nbytes, grad_nbytes = _block_nbytes(Block(6, 10).parameters(), world_size)
    (x,) = vectors(generator(rank))
    depth = 6
    model = _chain(depth, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        _step(model, optimizer, x)
    stats = _memory_stats(model)
    assert stats["num_blocks"] == depth + 2
    assert stats["arena_nbytes"] == depth * param_nbytes + 2 * grad_nbytes


@distributed(world_size=2)
def test_arena_in_bf16_is_half(rank: int, world_size: int) -> None:
    """Unsharded parameters and gradients take two bytes per element, shards four."""
    (x,) = vectors(generator(rank))
    for itemsize, precision in (
        (4, None),
        (2, MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)),
    ):
        torch.manual_seed(0)
        needs_fsdp_c("has no memory_stats")
        model = fsdp(
            nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            mixed_precision=precision,
            use_orig_params=True,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            _step(model, optimizer, x.repeat(1, 3)[:, :16])
        stats = _memory_stats(model)
        assert stats["shard_nbytes"] == 4 * (16 * 16 + 16) * 4 // 2
        layer = nn.Linear(16, 16).parameters()
        param_nbytes, grad_nbytes = _block_nbytes(layer, world_size, itemsize)
        assert stats["arena_nbytes"] == 2 * param_nbytes + 2 * grad_nbytes


@distributed(world_size=2)
def test_number_of_collectives(rank: int, world_size: int) -> None:
    """FULL_SHARD: two gathers and one reduction per unit and step.

    The unit that runs last could skip its second gather; at most one is saved.
    """
    (x,) = vectors(generator(rank))
    depth = 5
    for strategy, most, least in [
        ("FULL_SHARD", 2 * depth, 2 * depth - 1),
        ("SHARD_GRAD_OP", depth, depth),
    ]:
        model = _chain(depth, sharding_strategy=ShardingStrategy[strategy])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        _step(model, optimizer, x)
        before = _memory_stats(model)
        _step(model, optimizer, x)
        after = _memory_stats(model)
        num_all_gathers = after["num_all_gathers"] - before["num_all_gathers"]
        assert least <= num_all_gathers <= most, strategy
        assert after["num_reduces"] - before["num_reduces"] == depth, strategy
        if strategy == "FULL_SHARD":
            num_prefetches = after["num_prefetches"] - before["num_prefetches"]
            assert depth - 2 <= num_prefetches <= depth - 1


@pytest.mark.trap(7)
@distributed(world_size=2)
def test_checkpointing_gathers_once_in_backward(rank: int, world_size: int) -> None:
    """Recomputation and backward share one gather (DESIGN.md, section 7)."""
    (x,) = vectors(generator(rank))

    class Net(_Chain):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    needs_fsdp_c("has no memory_stats")
    model = fsdp(
        Net(4), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    _step(model, optimizer, x)
    before = _memory_stats(model)
    _step(model, optimizer, x)
    after = _memory_stats(model)
    assert after["num_all_gathers"] - before["num_all_gathers"] <= 2 * 4


@pytest.mark.trap(10)
@distributed(world_size=2)
def test_no_sync_holds_gradients_only(rank: int, world_size: int) -> None:
    """After a no_sync backward parameters are given back, gradients are kept."""
    depth = 4
    _, grad_nbytes = _block_nbytes(Block(6, 10).parameters(), world_size)
    (x,) = vectors(generator(rank))
    model = _chain(depth)
    with model.no_sync():
        loss_of(model(x)).backward()
    assert _memory_stats(model)["held_nbytes"] == depth * grad_nbytes
    loss_of(model(x)).backward()
    assert _memory_stats(model)["held_nbytes"] == 0


@distributed(world_size=2)
def test_exception_gives_everything_back(rank: int, world_size: int) -> None:
    """After an exception in forward the next step holds nothing more."""
    (x,) = vectors(generator(rank))
    model = _chain(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        _step(model, optimizer, x)
    before = _memory_stats(model)
    with pytest.raises(RuntimeError):
        model(torch.zeros(4, 7))
    _step(model, optimizer, x)
    after = _memory_stats(model)
    assert after["held_nbytes"] == 0
    assert after["arena_nbytes"] == before["arena_nbytes"]
