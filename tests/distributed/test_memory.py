"""Memory in bytes, against arithmetic written here.

A unit's segments, one per (dtype, requires_grad), are cut into equal shards. With
use_orig_params each parameter starts at a multiple of 16 bytes in the dtype that it is
computed in (FSDP1's layout); on an accelerator each does always, and each shard too. A
block holds the unsharded segments, each from a multiple of 256 bytes on. Blocks come
and go, and on a host so does the scratch of gloo's reductions: as much as the gradients
that are reduced, or, of two ranks, half of it. Ranks that share memory need none, nor
do those of an accelerator.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import hybrid_groups
from helpers.impl import (
    BackwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
    fsdp,
    memory_stats,
)
from helpers.models import CASES, MLP, Block, Chain, loss_of, vectors
from helpers.rows import APIS, in_either_api
from helpers.seeds import generator
from helpers.transports import num_scratches

ALIGNMENT_NBYTES = 16
SEGMENT_ALIGNMENT_NBYTES = 256
ON_HOST = TEST_DEVICE == "cpu"
LARGE_UNIT_NBYTES = 1 << 20
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
    "partial_grad_nbytes",
    "scratch_nbytes",
    "ring_nbytes",
    "num_iterations",
    "num_all_gathers",
    "num_reduces",
    "num_prefetches",
}


def _reserved_nbytes() -> int:
    """Return what an accelerator's allocator has taken from the device."""
    if ON_HOST:
        return 0
    return torch.cuda.memory_reserved()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _shards(
    params: Iterable[Tensor],
    world_size: int,
    compute_itemsize: int = 16,
    use_orig_params: bool = True,
) -> dict[tuple[torch.dtype, bool], int]:
    """Return the bytes of a shard of each segment, by (dtype, requires_grad)."""
    numels: dict[tuple[torch.dtype, bool], int] = {}
    params = list(params)
    unit_nbytes = sum(param.numel() * param.element_size() for param in params)
    aligns_all = not ON_HOST and unit_nbytes >= LARGE_UNIT_NBYTES
    aligns_params = use_orig_params or aligns_all
    for param in params:
        alignment = ALIGNMENT_NBYTES // min(compute_itemsize, param.element_size())
        key = (param.dtype, param.requires_grad)
        offset = _round_up(numels.get(key, 0), alignment if aligns_params else 1)
        numels[key] = offset + param.numel()
    shards = {}
    for (dtype, trains), numel in numels.items():
        alignment = ALIGNMENT_NBYTES // min(compute_itemsize, dtype.itemsize)
        shard = _round_up(-(-numel // world_size), alignment if aligns_all else 1)
        shards[dtype, trains] = shard * dtype.itemsize
    return shards


def _trainable_shards(module: nn.Module, world_size: int) -> list[int]:
    """Return the bytes of the shards of the segments that are trained."""
    shards = _shards(module.parameters(), world_size)
    return [nbytes for (_, trains), nbytes in shards.items() if trains]


def _shard_nbytes(params: Iterable[Tensor], world_size: int) -> int:
    return sum(_shards(params, world_size).values())


def _in_block(segments: Iterable[int]) -> int:
    """Return the bytes of a block of segments of so many bytes."""
    nbytes = 0
    for segment in segments:
        nbytes = _round_up(nbytes, SEGMENT_ALIGNMENT_NBYTES) + segment
    return nbytes


def _block_nbytes(
    params: Iterable[Tensor], world_size: int, itemsize: int = 4, compute: int = 4
) -> int:
    """Return the bytes of a block of parameters, or gradients, of ``itemsize``.

    For a unit of one fp32 segment, computed in ``compute`` bytes per element.
    """
    ((_, shard),) = _shards(params, world_size, compute).items()
    return shard * world_size // 4 * itemsize


def _of_equal_units(
    param_nbytes: int, grad_nbytes: int, prefetches: bool = True
) -> int:
    """Return the most that a chain's blocks take.

    On a host the gradients follow the parameters. On an accelerator forward holds the
    next unit, too, and backward the gradients that are reduced.
    """
    if ON_HOST:
        return max(param_nbytes, grad_nbytes)
    backward = (2 if prefetches else 1) * param_nbytes + grad_nbytes
    return max(2 * param_nbytes, backward)


def _scratch_nbytes(grad_nbytes: int, world_size: int, group: Any = None) -> int:
    """Return the scratch of a unit whose gradients have so many bytes."""
    return num_scratches(group) * grad_nbytes // world_size * (world_size - 1)


def _step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    optimizer.step()


def _blocks(number: int) -> Chain:
    return Chain(Block(6, 10) for _ in range(number))


def _chain(num_blocks: int, **kwargs: Any) -> Any:
    return fsdp(_blocks(num_blocks), units={Block}, use_orig_params=True, **kwargs)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(
    "model", ["mlp", "uneven", "tied", "frozen", "mixed_dtype", "scalar"]
)
@distributed(world_size=(2, 3))
def test_shards(rank: int, world_size: int, model: str, use_orig_params: bool) -> None:
    """One unit: the shard of each segment, and gradients of the trainable ones."""
    case = CASES[model]
    module = case.build()
    shards = _shards(module.parameters(), world_size, use_orig_params=use_orig_params)
    sharded = fsdp(module, use_orig_params=use_orig_params)
    stats = memory_stats(sharded)
    assert set(stats) >= KEYS
    assert stats["num_units"] == 1
    assert stats["shard_nbytes"] == sum(shards.values())
    loss_of(sharded(*case.inputs(generator(rank)))).backward()
    trainable = sum(nbytes for (_, trains), nbytes in shards.items() if trains)
    assert memory_stats(sharded)["grad_shard_nbytes"] == trainable


@distributed(world_size=(2, 3))
def test_shards_of_several_units(world_size: int) -> None:
    """Units do not share padding."""
    model = CASES["mlp"].build()
    block = list(Block().parameters())
    root = [p for n, p in model.named_parameters() if "blocks" not in n]
    expected = 3 * _shard_nbytes(block, world_size) + _shard_nbytes(root, world_size)
    sharded = fsdp(model, units={Block}, use_orig_params=True)
    stats = memory_stats(sharded)
    assert stats["num_units"] == 4
    assert stats["shard_nbytes"] == expected


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(world_size=2)
def test_no_allocation_after_the_second_step(
    rank: int, set_to_none: bool, strategy: str
) -> None:
    """Of the device. Blocks are the same in each step, and none is left between."""
    model = _chain(5, sharding_strategy=ShardingStrategy[strategy])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    (x,) = vectors(generator(rank))
    for _ in range(2):
        _step(model, optimizer, x)
    before = memory_stats(model)
    assert before["held_nbytes"] == 0
    assert before["arena_nbytes"] == 0
    reserved = _reserved_nbytes()
    num_allocs = set()
    for step in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model(x)).backward()
        stats = memory_stats(model)
        assert stats["held_nbytes"] == 0, step
        optimizer.step()
        for key in ("arena_nbytes", "peak_nbytes", "num_blocks"):
            assert stats[key] == before[key], (key, step)
        num_allocs.add((stats["num_allocs"] - before["num_allocs"]) / (step + 1))
        assert stats["grad_shard_nbytes"] == before["grad_shard_nbytes"], step
        assert stats["num_iterations"] == before["num_iterations"] + step + 1
    assert len(num_allocs) == 1
    assert _reserved_nbytes() == reserved


@pytest.mark.trap(8)
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST", None])
@distributed(world_size=(2, 3))
def test_arena_of_equal_units(rank: int, world_size: int, prefetch: str | None) -> None:
    """The arena does not grow with the depth: FULL_SHARD needs three blocks.

    Two for parameters (the unit that computes and the next one) and one for
    gradients on the reduce lane; those that come have none. Nor does the scratch.
    On a host those that are reduced take the place of the parameters, and the next
    unit comes after them.
    """
    nbytes = _block_nbytes(Block(6, 10).parameters(), world_size)
    (x,) = vectors(generator(rank))
    for depth in (5, 9):
        model = _chain(depth, backward_prefetch=prefetch and BackwardPrefetch[prefetch])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            _step(model, optimizer, x)
        stats = memory_stats(model)
        assert stats["num_clients"] == 2 * depth
        assert stats["num_blocks"] == 0
        prefetches = prefetch == "BACKWARD_PRE"
        assert stats["peak_nbytes"] == _of_equal_units(nbytes, nbytes, prefetches)
        assert stats["scratch_nbytes"] == _scratch_nbytes(nbytes, world_size)


@pytest.mark.trap(8)
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST", None])
@distributed(world_size=2)
def test_arena_of_frozen_layers(
    rank: int, world_size: int, prefetch: str | None
) -> None:
    """A block of parameters holds frozen ones, a block of gradients does not.

    On a host they are not there at the same time.
    """
    block = Block(6, 10)
    block.fc1.requires_grad_(False)
    segments = [
        nbytes * world_size for nbytes in _shards(block.parameters(), 2).values()
    ]
    grad_nbytes = _block_nbytes(block.fc2.parameters(), world_size)
    (x,) = vectors(generator(rank))
    for depth in (5, 9):
        module = _blocks(depth)
        for each in module.blocks:
            each.fc1.requires_grad_(False)
        model = fsdp(
            module,
            units={Block},
            use_orig_params=True,
            backward_prefetch=prefetch and BackwardPrefetch[prefetch],
        )
        for _ in range(3):
            loss_of(model(x)).backward()
        stats = memory_stats(model)
        prefetches = prefetch == "BACKWARD_PRE"
        expected = _of_equal_units(_in_block(segments), grad_nbytes, prefetches)
        assert stats["peak_nbytes"] == expected
        assert stats["scratch_nbytes"] == _scratch_nbytes(grad_nbytes, world_size)


@pytest.mark.trap(8)
@distributed(world_size=2)
def test_arena_of_shard_grad_op(rank: int, world_size: int) -> None:
    """Parameters stay unsharded from forward to backward: one block per unit.

    Gradients take the place of the parameters of their unit. The first forward of an
    accelerator does not know that no unit follows the last one.
    """
    nbytes = _block_nbytes(Block(6, 10).parameters(), world_size)
    (x,) = vectors(generator(rank))
    depth = 6
    model = _chain(depth, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        _step(model, optimizer, x)
    stats = memory_stats(model)
    num_blocks = depth if ON_HOST else depth + 1
    assert stats["num_blocks"] == 0
    assert stats["peak_nbytes"] == num_blocks * nbytes
    assert stats["scratch_nbytes"] == _scratch_nbytes(nbytes, world_size)


@distributed(world_size=(2, 3))
def test_what_is_kept_for_backward(rank: int, world_size: int) -> None:
    """Between forward and backward it is held, and parameters show it."""
    depth = 4
    nbytes = _block_nbytes(Block(6, 10).parameters(), world_size)
    (x,) = vectors(generator(rank))
    model = _chain(depth, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    before = [(p.data_ptr(), p.shape) for p in model.parameters()]
    whole = [p.shape for p in Block(6, 10).parameters()] * depth
    for _ in range(2):
        loss = loss_of(model(x))
        assert memory_stats(model)["held_nbytes"] == depth * nbytes
        assert [p.shape for p in model.parameters()] == whole
        loss.backward()
        assert memory_stats(model)["held_nbytes"] == 0
        assert [(p.data_ptr(), p.shape) for p in model.parameters()] == before


@distributed(world_size=2)
def test_arena_in_bf16_is_half(rank: int, world_size: int) -> None:
    """Unsharded parameters and gradients take two bytes per element, shards four.

    Gradients and scratch are in the dtype of the reduction.
    """
    (x,) = vectors(generator(rank))
    bf16 = torch.bfloat16
    for param_itemsize, grad_itemsize, precision in (
        (4, 4, None),
        (2, 2, MixedPrecision(param_dtype=bf16, reduce_dtype=bf16)),
        (2, 4, MixedPrecision(param_dtype=bf16, reduce_dtype=torch.float32)),
        (4, 2, MixedPrecision(reduce_dtype=bf16)),
    ):
        torch.manual_seed(0)
        model = fsdp(
            nn.Sequential(*(nn.Linear(16, 16) for _ in range(5))),
            units={nn.Linear},
            mixed_precision=precision,
            use_orig_params=True,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            _step(model, optimizer, x.repeat(1, 3)[:, :16])
        stats = memory_stats(model)
        assert stats["shard_nbytes"] == 5 * (16 * 16 + 16) * 4 // 2
        param_nbytes, grad_nbytes = (
            _block_nbytes(
                nn.Linear(16, 16).parameters(), world_size, itemsize, param_itemsize
            )
            for itemsize in (param_itemsize, grad_itemsize)
        )
        assert stats["peak_nbytes"] == _of_equal_units(param_nbytes, grad_nbytes)
        assert stats["scratch_nbytes"] == _scratch_nbytes(grad_nbytes, world_size)


@distributed(world_size=2)
def test_number_of_collectives(rank: int) -> None:
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
        before = memory_stats(model)
        _step(model, optimizer, x)
        after = memory_stats(model)
        num_all_gathers = after["num_all_gathers"] - before["num_all_gathers"]
        assert least <= num_all_gathers <= most, strategy
        assert after["num_reduces"] - before["num_reduces"] == depth, strategy
        if strategy == "FULL_SHARD":
            num_prefetches = after["num_prefetches"] - before["num_prefetches"]
            assert depth - 2 <= num_prefetches <= depth - 1


@pytest.mark.trap(10)
@distributed(world_size=2)
def test_no_sync_holds_gradients_only(rank: int, world_size: int) -> None:
    """After a no_sync backward parameters are given back, gradients are kept."""
    depth = 4
    nbytes = _block_nbytes(Block(6, 10).parameters(), world_size)
    (x,) = vectors(generator(rank))
    model = _chain(depth)
    with model.no_sync():
        loss_of(model(x)).backward()
    stats = memory_stats(model)
    assert stats["held_nbytes"] == depth * nbytes
    assert stats["scratch_nbytes"] == stats["grad_shard_nbytes"] == 0
    loss_of(model(x)).backward()
    stats = memory_stats(model)
    assert stats["held_nbytes"] == 0
    assert stats["scratch_nbytes"] == _scratch_nbytes(nbytes, world_size)


@pytest.mark.trap(14)
@distributed(world_size=4)
def test_no_sync_with_replicas(rank: int) -> None:
    """It keeps a block of gradients per unit; the scratch is what it is without."""
    num_shards = 2
    nbytes = _block_nbytes(Block(6, 10).parameters(), num_shards)
    (x,) = vectors(generator(rank))
    with hybrid_groups(2, num_shards) as groups:
        for depth in (4, 7):
            model = _chain(
                depth,
                process_group=groups,
                sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            )
            for _ in range(3):
                with model.no_sync():
                    loss_of(model(x)).backward()
                loss_of(model(x)).backward()
                model.zero_grad()
            stats = memory_stats(model)
            # On a host there is one unit's parameters beside the gradients.
            num_blocks = depth + (1 if ON_HOST else 2)
            assert stats["peak_nbytes"] == num_blocks * nbytes
            scratch = _scratch_nbytes(nbytes, num_shards, groups[0])
            assert stats["scratch_nbytes"] == scratch
            assert stats["partial_grad_nbytes"] == 0
            del model


@pytest.mark.trap(10)
@pytest.mark.parametrize("itemsize", [2, 4])
@distributed(world_size=(2, 3))
def test_sharded_no_sync(rank: int, world_size: int, itemsize: int) -> None:
    """One shard per unit, in the dtype of the reduction, from the first one on."""
    depth = 5
    params = list(Block(6, 10).parameters())
    ((_, shard),) = _shards(params, world_size).items()
    param_nbytes = shard * world_size
    grad_nbytes = _block_nbytes(params, world_size, itemsize)
    (x,) = vectors(generator(rank))
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    model = _chain(depth, mixed_precision=MixedPrecision(reduce_dtype=dtype))
    loss_of(model(x)).backward()
    assert memory_stats(model)["partial_grad_nbytes"] == 0
    for _ in range(3):
        model.zero_grad()
        for _ in range(2):
            with model.no_sync(sharded=True):
                loss_of(model(x)).backward()
            stats = memory_stats(model)
            assert stats["partial_grad_nbytes"] == depth * shard // 4 * itemsize
            assert stats["held_nbytes"] == stats["grad_shard_nbytes"] == 0
        loss_of(model(x)).backward()
        stats = memory_stats(model)
        assert stats["partial_grad_nbytes"] == 0
        assert stats["grad_shard_nbytes"] == depth * shard
        assert stats["held_nbytes"] == 0
        assert stats["peak_nbytes"] == _of_equal_units(param_nbytes, grad_nbytes)
        assert stats["scratch_nbytes"] == _scratch_nbytes(grad_nbytes, world_size)


@distributed(world_size=(2, 3))
def test_partial_sums_of_several_dtypes(rank: int, world_size: int) -> None:
    """The segments of a unit's block lie at 256-byte steps."""
    case = CASES["mixed_dtype"]
    module = case.build()
    shards = _trainable_shards(module, world_size)
    model = fsdp(module, use_orig_params=True)
    with model.no_sync(sharded=True):
        loss_of(model(*case.inputs(generator(rank)))).backward()
    assert memory_stats(model)["partial_grad_nbytes"] == _in_block(shards)


@distributed(world_size=2)
@pytest.mark.parametrize("api", ["FSDP flat"] if ON_HOST else APIS)
def test_a_cleared_gradient_is_gone(api: str) -> None:
    """At once, not with the next forward; one that somebody holds keeps its values."""
    both = in_either_api(api, MLP, {Block})
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(3):
        both.train(1)
        grads = [param.grad for param in both.model.parameters()]
        first, *others = [grad for grad in grads if grad is not None]
        references = [weakref.ref(grad) for grad in others]
        kept.append((first, first.clone()))
        del grads, others
        assert all(each() is not None for each in references)
        both.zero_grad()
        assert all(each() is None for each in references)
        for grad, values in kept:
            assert torch.equal(grad, values)
