"""Native placements and copy plans, against slicing and torch.chunk; crc32c.

Ranks are numbers here: every rank's buffers are in this one process.
"""

import gc
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_c import FullyShardedDataParallel, _native
from fsdp_c._native import CopyPlan, Layout, Placement
from helpers.distributed import distributed
from helpers.impl import IS_TORCH
from helpers.seeds import seed_of

pytestmark = pytest.mark.skipif(IS_TORCH, reason="tests fsdp_c's own API")

SHAPES = [(5, 3), (4,), (), (0, 7), (2, 1, 3), (17,), (1, 6)]
WORLD_SIZES = (1, 2, 3, 4, 7)
ALIGNMENTS = ((16, True, True), (16, True, False), (4, False, False))


def make_layout(
    shapes: list[tuple[int, ...]],
    world_size: int,
    alignment: tuple[int, bool, bool] = ALIGNMENTS[0],
) -> Layout:
    params = [(torch.Size(shape).numel(), torch.float32, True) for shape in shapes]
    itemsize, align_params, align_shards = alignment
    return Layout(
        params,
        world_size,
        itemsize=itemsize,
        align_params=align_params,
        align_shards=align_shards,
    )


def make_tensors(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Return tensors whose elements all differ."""
    begins = [1000.0 * (i + 1) for i in range(len(shapes))]
    return [
        begin + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        for begin, shape in zip(begins, shapes, strict=True)
    ]


def shards_of(layout: Layout, tensors: list[Tensor], padding: float) -> list[Tensor]:
    """Return segment 0's shards of all ranks: the flat tensor, cut."""
    _, _, _, _, shard_numel, padded_numel = layout.segments[0]
    flat = torch.full((padded_numel,), padding)
    for (segment, offset, numel), tensor in zip(layout.slots, tensors, strict=True):
        assert segment == 0
        flat[offset : offset + numel] = tensor.flatten()
    return [shard.clone() for shard in flat.split(shard_numel)]


def empty_like(tensors: list[Tensor], value: float) -> list[Tensor]:
    return [torch.full_like(tensor, value) for tensor in tensors]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e), (a, e)


# Conversions ----------------------------------------------------------------


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_flat_to_whole_and_back(
    world_size: int, alignment: tuple[int, bool, bool]
) -> None:
    layout = make_layout(SHAPES, world_size, alignment)
    tensors = make_tensors(SHAPES)
    shards = shards_of(layout, tensors, padding=-1.0)
    numels = [tensor.numel() for tensor in tensors]
    flat, whole = Placement.flat(layout, 0), Placement.whole(numels)

    gather = CopyPlan(flat, whole)
    result = empty_like(tensors, -2.0)
    gather.run(shards, result)
    assert_equal(result, tensors)
    assert gather.missing == []
    assert gather.numel == sum(numels)

    scatter = CopyPlan(whole, flat)
    back = empty_like(shards, -1.0)  # padding is not written
    scatter.run(tensors, back)
    assert_equal(back, shards)

    for rank in range(world_size):
        own: list[Tensor | None] = [None] * world_size
        own[rank] = target = torch.full_like(shards[rank], -1.0)
        CopyPlan(whole, Placement.flat(layout, 0, rank=rank)).run(tensors, own)
        assert torch.equal(target, shards[rank])


@pytest.mark.parametrize("target_world_size", WORLD_SIZES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_other_world_size(world_size: int, target_world_size: int) -> None:
    source = make_layout(SHAPES, world_size, ALIGNMENTS[1])
    target = make_layout(SHAPES, target_world_size, ALIGNMENTS[0])
    tensors = make_tensors(SHAPES)
    from_shards = shards_of(source, tensors, padding=-1.0)
    to_shards = shards_of(target, tensors, padding=-2.0)
    for rank, expected in enumerate(to_shards):
        wanted = Placement.flat(target, 0, rank=rank)
        ranges = [(param, begin, end) for param, begin, end, _, _ in wanted.pieces]
        needed = Placement.flat_range(source, 0, ranges)
        assert {p[:3] for p in needed.pieces} <= {
            (param, begin, end)
            for param, b, e in ranges
            for begin in range(b, e)
            for end in range(begin + 1, e + 1)
        }
        plan = CopyPlan(needed, wanted)
        assert plan.missing == []
        actual = torch.full_like(expected, -2.0)
        targets: list[Tensor | None] = [None] * rank
        plan.run(from_shards, [*targets, actual])
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rows_are_those_of_torch_chunk(world_size: int) -> None:
    layout = make_layout(SHAPES, world_size, ALIGNMENTS[1])
    tensors = make_tensors(SHAPES)
    rows = Placement.rows(SHAPES, world_size)
    packed: list[list[Tensor]] = [[] for _ in range(world_size)]
    for tensor in tensors:
        # torch.chunk refuses a scalar: it is one row.
        chunks = tensor.reshape(-1 if tensor.dim() == 0 else tensor.shape)
        for rank, chunk in enumerate(chunks.chunk(world_size)):
            packed[rank].append(chunk.flatten())
    expected = [torch.cat(parts) if parts else torch.empty(0) for parts in packed]

    actual = empty_like(expected, -1.0)
    shards = shards_of(layout, tensors, padding=-1.0)
    CopyPlan(Placement.flat(layout, 0), rows).run(shards, actual)
    assert_equal(actual, expected)
    for rank in range(world_size):
        alone = Placement.rows(SHAPES, world_size, rank=rank)
        assert alone.pieces == [p for p in rows.pieces if p[3] == rank]

    back = empty_like(shards, -1.0)
    CopyPlan(rows, Placement.flat(layout, 0)).run(expected, back)
    assert_equal(back, shards)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_local_parts(world_size: int) -> None:
    layout = make_layout(SHAPES, world_size)
    tensors = make_tensors(SHAPES)
    for rank in range(world_size):
        local = Placement.local(layout, 0, rank)
        parts = []
        for param, tensor in enumerate(tensors):
            begin, end, _, _ = layout.intersect(param, rank)
            parts.append(tensor.flatten()[begin:end])
        whole = Placement.whole([tensor.numel() for tensor in tensors])
        actual = empty_like(parts, -1.0)
        CopyPlan(whole, local).run(tensors, actual)
        assert_equal(actual, parts)


def test_segments_keep_the_params_of_the_unit() -> None:
    layout = Layout(
        [(4, torch.float32, True), (3, torch.int64, False), (2, torch.float32, True)],
        2,
        itemsize=16,
        align_params=False,
        align_shards=False,
    )
    assert [segment[0] for segment in layout.segments] == [torch.float32, torch.int64]
    assert Placement.flat(layout, 0).pieces == [
        (0, 0, 3, 0, 0),
        (0, 3, 4, 1, 0),
        (2, 0, 2, 1, 1),
    ]
    assert Placement.flat(layout, 1).pieces == [(1, 0, 2, 0, 0), (1, 2, 3, 1, 0)]
    assert Placement.local(layout, 0, 1).pieces == [(0, 3, 4, 0, 0), (2, 0, 2, 2, 0)]
    source = [torch.tensor([7, 8]), torch.tensor([9, 0])]
    target = torch.zeros(3, dtype=torch.int64)
    plan = CopyPlan(Placement.flat(layout, 1), Placement.whole([0, 3, 0]))
    plan.run(source, [None, target, None])
    assert target.tolist() == [7, 8, 9]


def test_random_pieces_match_an_element_by_element_oracle() -> None:
    for case in range(200):
        seed = seed_of("random_pieces", case)
        draw = random.Random(seed)
        pieces = []
        for _ in range(draw.randrange(12)):
            begin = draw.randrange(20)
            pieces.append(
                (
                    draw.randrange(3),
                    begin,
                    begin + draw.randrange(10),
                    draw.randrange(3),
                    draw.randrange(30),
                )
            )
        held: dict[tuple[int, int], tuple[int, int]] = {}
        for param, begin, end, buffer, offset in sorted(pieces, key=lambda p: p[:2]):
            for i in range(begin, end):
                held.setdefault((param, i), (buffer, offset + i - begin))
        numels = [25, 0, 25]
        plan = CopyPlan(Placement(pieces), Placement.whole(numels))
        sources = [torch.arange(40) + 100 * (i + 1) for i in range(3)]
        targets = [torch.full((numel,), -1) for numel in numels]
        plan.run(sources, targets)
        missing = {
            (param, i) for param, begin, end in plan.missing for i in range(begin, end)
        }
        for param, target in enumerate(targets):
            for i, value in enumerate(target.tolist()):
                place = held.get((param, i))
                assert ((param, i) in missing) == (place is None), seed
                expected = -1 if place is None else int(sources[place[0]][place[1]])
                assert value == expected, seed
        assert plan.numel == sum(p != 1 and i < 25 for p, i in held)


def test_4096_ranks_cost_what_is_read() -> None:
    params = [(10_000_000 + i, torch.float32, True) for i in range(200)]
    saved = Layout(params, 4096, align_params=True, align_shards=True)
    wanted = Layout(params, 7, align_params=True, align_shards=False)
    wanted_pieces = Placement.flat(wanted, 0, rank=3)
    ranges = [piece[:3] for piece in wanted_pieces.pieces]
    source = Placement.flat_range(saved, 0, ranges)
    assert len(source) < 4096 / 7 + 2 * len(ranges) + 2
    plan = CopyPlan(source, wanted_pieces)
    assert plan.missing == []
    assert plan.numel == sum(end - begin for _, begin, end in ranges)


# Plans ----------------------------------------------------------------------


def test_neighbours_are_joined_and_replicas_left_out() -> None:
    source = Placement(
        [(0, 4, 8, 1, 4), (0, 0, 4, 1, 0), (1, 0, 2, 1, 8), (0, 0, 8, 2, 0)]
    )
    assert len(source) == 4
    plan = CopyPlan(source, Placement([(0, 0, 8, 0, 10), (1, 0, 3, 0, 18)]))
    assert plan.copies == [(1, 0, 0, 10, 4), (2, 4, 0, 14, 4), (1, 8, 0, 18, 2)]
    assert plan.missing == [(1, 2, 3)]
    assert plan.numel == 10
    one = CopyPlan(Placement([(0, 0, 8, 5, 0)]), Placement([(0, 0, 8, 0, 0)] * 2))
    assert one.copies == [(5, 0, 0, 0, 8)]
    nothing = CopyPlan(Placement([]), Placement([]))
    assert (nothing.copies, nothing.missing, nothing.numel) == ([], [], 0)
    nothing.run([], [])


def test_two_elements_in_one_place_are_refused() -> None:
    target = Placement([(0, 0, 4, 0, 0), (1, 0, 4, 0, 3)])
    with pytest.raises(ValueError, match=r"target buffer 0 .* offset 3"):
        CopyPlan(Placement.whole([4, 4]), target)


def test_absent_buffers_are_left_out() -> None:
    plan = CopyPlan(
        Placement.whole([2, 2]), Placement([(0, 0, 2, 0, 0), (1, 0, 2, 1, 0)])
    )
    target = torch.zeros(2)
    plan.run([torch.ones(2), None], [target, torch.ones(0)])
    assert target.tolist() == [1, 1]
    plan.run([torch.full((2,), 5.0), torch.ones(2)], [None, target])
    assert target.tolist() == [1, 1]


def test_run_takes_any_dtype_shape_and_layer_of_autograd() -> None:
    plan = CopyPlan(Placement.whole([6]), Placement([(0, 1, 5, 0, 2)]))
    for dtype in (torch.bool, torch.bfloat16, torch.float64, torch.complex64):
        source = torch.arange(6).remainder(2).to(dtype).view(2, 3)
        target = torch.zeros(2, 4, dtype=dtype)
        plan.run([source], [target])
        assert torch.equal(target.flatten()[2:6], source.flatten()[1:5])
        assert target.flatten()[[0, 1, 6, 7]].count_nonzero() == 0
    param = nn.Parameter(torch.zeros(8))
    version = param._version
    plan.run([torch.ones(6)], [param])
    assert param._version == version + 1
    assert param.sum().item() == 4
    assert param.grad_fn is None


def test_run_frees_the_gil() -> None:
    numel = 1 << 24
    plan = CopyPlan(Placement.whole([numel]), Placement.whole([numel]))
    source, target = torch.ones(numel), torch.zeros(numel)
    stop, ticks = threading.Event(), [0]

    def count() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)  # gives the GIL up

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody is made to give it up
    thread = threading.Thread(target=count)
    try:
        thread.start()
        before = ticks[0]
        for _ in range(3):
            plan.run([source], [target])
        seen = ticks[0] - before
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert seen > 0
    assert torch.equal(source, target)


# Errors ---------------------------------------------------------------------

PLAN = (Placement.whole([4, 4]), Placement([(0, 0, 4, 0, 0), (1, 0, 4, 1, 6)]))
FOUR, TEN = torch.ones(4, device="cpu"), torch.zeros(10, device="cpu")

BAD_RUNS: dict[str, tuple[list[Any], list[Any], str]] = {
    "source small": (
        [FOUR, torch.ones(3)],
        [FOUR.clone(), TEN],
        "source buffer 1 has 3 elements, the plan needs 4",
    ),
    "target small": (
        [FOUR, FOUR],
        [FOUR.clone(), torch.ones(9)],
        "target buffer 1 has 9 elements, the plan needs 10",
    ),
    "too few sources": ([FOUR], [FOUR.clone(), TEN], "source buffer 1, given are 1"),
    "too few targets": ([FOUR, FOUR], [], "target buffer 0, given are 0"),
    "dtype": ([FOUR, FOUR], [FOUR.clone(), TEN.double()], "target 1 is of Double"),
    "strided": ([FOUR, torch.ones(4, 2)[:, 0]], [FOUR.clone(), TEN], "contiguous"),
    "no tensor": ([FOUR, 3], [FOUR.clone(), TEN], "source 1 is neither"),
    "meta": ([FOUR, FOUR], [FOUR.clone(), TEN.to("meta")], "target 1 is on the meta"),
    "sparse": (
        [FOUR, FOUR.to_sparse()],
        [FOUR.clone(), TEN],
        "source 1 is not a plain",
    ),
    "same memory": ([FOUR, FOUR], [FOUR, TEN], "source 0 shares memory with target 0"),
    "overlap": (
        [FOUR, TEN[6:]],
        [FOUR.clone(), TEN],
        "source 1 shares memory with target 1",
    ),
    "conjugate": (
        [torch.ones(4, dtype=torch.complex64), torch.ones(4, dtype=torch.complex64)],
        [None, torch.ones(10, dtype=torch.complex64).conj()],
        "lazy conjugate",
    ),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_bad_run_is_refused_before_anything_is_written(name: str) -> None:
    sources, targets, message = BAD_RUNS[name]
    copies = [t.clone() if isinstance(t, Tensor) else t for t in targets]
    with pytest.raises(ValueError, match=message):
        CopyPlan(*PLAN).run(sources, targets)
    for target, copy in zip(targets, copies, strict=True):
        if isinstance(target, Tensor) and not target.is_meta:
            assert torch.equal(target, copy)


LAYOUT = make_layout([(4,), (3,)], 2)
BIG = 2**63 - 1
BAD_CALLS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "piece short": (
        lambda: Placement([(0, 1, 2)]),
        TypeError,
        r"pieces\[0\] must be 5",
    ),
    "piece text": (lambda: Placement(["abcde"]), TypeError, "integer"),
    "piece float": (lambda: Placement([(0, 0, 1.0, 0, 0)]), TypeError, "integer"),
    "piece huge": (lambda: Placement([(0, 0, 2**63, 0, 0)]), OverflowError, "int"),
    "piece end": (lambda: Placement([(0, 0, 9, 0, BIG)]), RuntimeError, "int64"),
    "piece param": (lambda: Placement([(-1, 0, 9, 0, 0)]), ValueError, "param -1"),
    "piece range": (lambda: Placement([(0, 9, 3, 0, 0)]), ValueError, "begin <= end"),
    "pieces": (lambda: Placement(3), TypeError, "iterable"),
    "segment": (lambda: Placement.flat(LAYOUT, 1), ValueError, "segment is 1"),
    "rank": (lambda: Placement.flat(LAYOUT, 0, rank=2), ValueError, "rank 2"),
    "local rank": (lambda: Placement.local(LAYOUT, 0, -1), ValueError, "rank -1"),
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
    "numel": (lambda: Placement.whole([3, -1]), ValueError, "parameter 1 has numel -1"),
    "ranks": (lambda: Placement.rows([(3,)], 0), ValueError, "num_ranks is 0"),
    "shape": (lambda: Placement.rows([(3, -1)], 1), ValueError, r"shapes\[0\]"),
    "shape big": (
        lambda: Placement.rows([(3, BIG, 2)], 1),
        OverflowError,
        r"shapes\[0\]",
    ),
    "rows big": (lambda: Placement.rows([(3, BIG)], 1), RuntimeError, "int64"),
    "plan": (lambda: CopyPlan(LAYOUT, LAYOUT), TypeError, "Placement"),
    "layout numel": (
        lambda: make_layout([(3,)], 0),
        ValueError,
        "world_size >= 1",
    ),
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
        plan = CopyPlan(Placement.flat(layout, 0), Placement([(0, 0, 4, 0, 0)]))
        plan.run([torch.ones(64)] * 3, [torch.ones(4)])
        _ = plan.copies, plan.missing, layout.segments, layout.slots, layout.alignment

    def fail() -> None:
        for call, _, _ in BAD_CALLS.values():
            with pytest.raises(Exception):  # noqa: B017, PT011
                call()

    for act in (use, fail):
        act()
        gc.collect()
        types = (Layout, Placement, CopyPlan, _native.Unit)
        before = [sys.getrefcount(each) for each in types]
        for _ in range(200):
            act()
        gc.collect()
        assert [sys.getrefcount(each) for each in types] == before


@distributed(world_size=(2, 3))
def test_layout_of_a_unit(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    whole = [param.detach().clone() for param in model.parameters()]
    wrapped = FullyShardedDataParallel(model, use_orig_params=True)
    unit = wrapped._unit
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

    # This rank's shard into empty whole parameters: its part, nothing else.
    shard = unit.shards[0]
    targets = [torch.full_like(param, torch.nan) for param in whole]
    plan = CopyPlan(
        Placement.flat(layout, 0, rank=rank),
        Placement.whole([param.numel() for param in whole]),
    )
    plan.run([shard if r == rank else None for r in range(world_size)], targets)
    for index, (target, param) in enumerate(zip(targets, whole, strict=True)):
        begin, end, _, _ = layout.intersect(index, rank)
        assert torch.equal(target.flatten()[begin:end], param.flatten()[begin:end])
        assert int(target.isnan().sum()) == param.numel() - (end - begin)

    # A layout keeps what it belongs to.
    slots = layout.slots
    del model, wrapped, unit, shard
    gc.collect()
    assert layout.slots == slots
