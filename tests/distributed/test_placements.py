"""Native placements as Python sees them, against torch.chunk; crc32c.

Ranks are numbers here: every rank's buffers are in this one process.
"""

import gc
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_c import FullyShardedDataParallel, _native
from fsdp_c._native import Layout, Placement, copy_tensors, prepare_exchange
from helpers.distributed import distributed

pytestmark = pytest.mark.bookkeeping

SHAPES = [(5, 3), (4,), (), (0, 7), (2, 1, 3), (17,), (1, 6)]
WORLD_SIZES = (1, 2, 3, 4, 7)


def make_layout(shapes: list[tuple[int, ...]], world_size: int) -> Layout:
    params = [(torch.Size(shape).numel(), torch.float32, True) for shape in shapes]
    return Layout(params, world_size, itemsize=16, align_params=True, align_shards=True)


def make_tensors(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Return tensors whose elements all differ."""
    begins = [1000.0 * (i + 1) for i in range(len(shapes))]
    return [
        begin + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        for begin, shape in zip(begins, shapes, strict=True)
    ]


def cut(tensors: list[Tensor], placement: Placement, rank: int) -> list[Tensor]:
    """Return what ``placement`` says that ``rank`` has of each tensor, 1-D."""
    found = [tensor.new_empty(0) for tensor in tensors]
    for param, begin, end, buffer, _ in placement.pieces:
        if buffer == rank:
            found[param] = tensors[param].flatten()[begin:end]
    return found


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e), (a, e)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rows_are_those_of_torch_chunk(world_size: int) -> None:
    tensors = make_tensors(SHAPES)
    rows = Placement.rows(SHAPES, world_size)
    for rank in range(world_size):
        expected = []
        for tensor in tensors:
            # torch.chunk refuses a scalar: it is one row.
            chunks = tensor.reshape(-1 if tensor.dim() == 0 else tensor.shape)
            own = [*chunks.chunk(world_size), *[tensor.new_empty(0)] * world_size][rank]
            expected.append(own.flatten())
        assert_equal(cut(tensors, rows, rank), expected)
        alone = Placement.rows(SHAPES, world_size, rank=rank)
        assert alone.pieces == [p for p in rows.pieces if p[3] == rank]


def test_4096_ranks_cost_what_is_read() -> None:
    params = [(10_000_000 + i, torch.float32, True) for i in range(200)]
    saved = Layout(params, 4096, align_params=True, align_shards=True)
    wanted = Layout(params, 7, align_params=True, align_shards=False)
    wanted_pieces = Placement.flat(wanted, 0, rank=3)
    ranges = [piece[:3] for piece in wanted_pieces.pieces]
    source = Placement.flat_range(saved, 0, ranges)
    assert len(source) < 4096 / 7 + 2 * len(ranges) + 2
    assert sum(end - begin for _, begin, end, _, _ in source.pieces) == sum(
        end - begin for _, begin, end in ranges
    )


LAYOUT = make_layout([(4,), (3,)], 2)
PLACEMENT = Placement.flat(LAYOUT, 0)
TEN = torch.arange(10.0)
BIG = 2**63 - 1
BAD_CALLS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "made": (lambda: Placement([]), TypeError, "cannot create"),
    "segment": (lambda: Placement.flat(LAYOUT, 1), ValueError, "segment is 1"),
    "rank": (lambda: Placement.flat(LAYOUT, 0, rank=2), ValueError, "rank 2"),
    "layout": (lambda: Placement.flat(3, 0), TypeError, "Layout"),
    "range end": (
        lambda: Placement.flat_range(LAYOUT, 0, [(1, 0, 4)]),
        ValueError,
        "parameter 1 of 3",
    ),
    "range param": (
        lambda: Placement.flat_range(LAYOUT, 0, [(2, 0, 1)]),
        ValueError,
        "param is 2",
    ),
    "numel": (lambda: Placement.on_ranks([3, -1], 0, 1), ValueError, "numel -1"),
    "numel text": (lambda: Placement.on_ranks(["3"], 0, 1), TypeError, "integer"),
    "on ranks": (lambda: Placement.on_ranks([3], 1, 0), ValueError, r"ranks \[1, 0\)"),
    "buffers": (lambda: PLACEMENT.buffers("x"), TypeError, "int"),
    "ranks": (lambda: Placement.rows([(3,)], 0), ValueError, "num_ranks is 0"),
    "shape": (lambda: Placement.rows([(3, -1)], 1), ValueError, r"shapes\[0\]"),
    "shape big": (
        lambda: Placement.rows([(3, BIG, 2)], 1),
        OverflowError,
        r"shapes\[0\]",
    ),
    "rows big": (lambda: Placement.rows([(3, BIG)], 1), RuntimeError, "int64"),
    "layout numel": (lambda: make_layout([(3,)], 0), ValueError, "world_size >= 1"),
    "layout dtype": (
        lambda: Layout([(3, "f", True)], 1, align_params=True, align_shards=True),
        TypeError,
        r"params\[0\]",
    ),
    "layout item": (
        lambda: Layout([3], 1, align_params=True, align_shards=True),
        TypeError,
        r"params\[0\]",
    ),
    "layout keyword": (lambda: Layout([], 1, align_params=True), TypeError, "align_"),
    "intersect": (lambda: LAYOUT.intersect(2, 0), IndexError, "param 2"),
    "crc device": (
        lambda: _native.crc32c(torch.ones(3, device="meta")),
        ValueError,
        "meta",
    ),
    "crc strided": (lambda: _native.crc32c(TEN[::2]), ValueError, "contiguous"),
    "crc value": (lambda: _native.crc32c(b"", 2**32), OverflowError, "32 bits"),
    "crc text": (lambda: _native.crc32c("text"), TypeError, "bytes-like"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call(name: str) -> None:
    call, expected, message = BAD_CALLS[name]
    with pytest.raises(expected, match=message):
        call()


# Checksum -------------------------------------------------------------------


def test_crc32c_vectors() -> None:
    assert _native.crc32c(b"123456789") == 0xE3069283
    assert _native.crc32c(bytes(32)) == 0x8A9136AA
    assert _native.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert _native.crc32c(b"") == 0
    assert _native.crc32c(b"6789", _native.crc32c(b"12345")) == 0xE3069283
    assert _native.crc32c(b"", 5) == 5


def test_crc32c_of_tensors_and_buffers() -> None:
    tensor = torch.arange(100_003, dtype=torch.int16)
    data = tensor.numpy().tobytes()
    expected = _native.crc32c(data)
    for same in (
        tensor,
        bytearray(data),
        memoryview(data),
        tensor.view(torch.bfloat16),
    ):
        assert _native.crc32c(same) == expected
    assert _native.crc32c(tensor[4:7]) == _native.crc32c(data[8:14])
    assert _native.crc32c(torch.empty(0)) == 0
    tensor[77_777] += 1
    assert _native.crc32c(tensor) != expected


# Lifetime -------------------------------------------------------------------


def test_nothing_leaks() -> None:
    def use() -> None:
        layout = make_layout(SHAPES, 3)
        held = Placement.flat(layout, 0)
        rows = Placement.rows(SHAPES, 3)
        whole = make_tensors(SHAPES)
        moves = [
            (source, source.dtype, i, held, rows, None, None)
            for i, source in enumerate(cut(whole, held, 0))
        ]
        cpu = torch.device("cpu")
        *_, copies, _ = prepare_exchange(0, 3, moves, cpu, direct_nbytes=24)
        copy_tensors(copies)
        _ = layout.segments, layout.slots, layout.alignment

    def fail() -> None:
        for call, _, _ in BAD_CALLS.values():
            with pytest.raises(Exception):  # noqa: B017, PT011
                call()

    for act in (use, fail):
        act()
        gc.collect()
        types = (Layout, Placement, _native.Unit)
        before = [sys.getrefcount(each) for each in types]
        for _ in range(40):
            act()
        gc.collect()
        assert [sys.getrefcount(each) for each in types] == before


@distributed(world_size=(2, 3))
def test_layout_of_a_unit(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    whole = [param.detach().clone() for param in model.parameters()]
    wrapped = FullyShardedDataParallel(model, use_orig_params=True)
    unit = wrapped._sharded.unit
    layout = unit.layout
    assert (layout.slots, layout.segments) == (unit.slots, unit.segments)
    assert layout.world_size == world_size
    assert layout.intersect(0, rank) == unit.intersect(0, rank)
    itemsize, align_params, align_shards = layout.alignment
    same = Layout(
        [(param.numel(), torch.float32, True) for param in whole],
        layout.world_size,
        itemsize=itemsize,
        align_params=align_params,
        align_shards=align_shards,
    )
    assert (same.slots, same.segments) == (layout.slots, layout.segments)

    # This rank's shard holds its parts.
    shard = unit.shards[0]
    for param, begin, end, _, offset in Placement.flat(layout, 0, rank=rank).pieces:
        part = shard[offset : offset + end - begin]
        assert torch.equal(part, whole[param].flatten()[begin:end])

    # A layout keeps what it belongs to.
    slots = layout.slots
    del model, wrapped, unit, shard
    gc.collect()
    assert layout.slots == slots
