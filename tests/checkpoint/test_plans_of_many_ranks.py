"""4,096 ranks without any of them: manifest and plans only."""

import tracemalloc
from dataclasses import replace

import pytest

from fsdp_c.checkpoint._holders import Holders, make_layout
from fsdp_c.checkpoint._manifest import (
    Manifest,
    OptimSpec,
    ParamSpec,
    SegmentSpec,
    StateSpec,
    UnitSpec,
    parse_manifest,
)

pytestmark = pytest.mark.bookkeeping

HIDDEN = 4096
ALIGNMENT = (4, True, True)


def _unit(name: str, shapes: dict[str, tuple[int, ...]], world_size: int) -> UnitSpec:
    params = tuple(
        ParamSpec(f"{name}.{key}", (), shape, "F32", True, 0, 0)
        for key, shape in shapes.items()
    )
    unit = UnitSpec(name, tuple(range(world_size)), ALIGNMENT, (), params)
    layout = make_layout(unit)
    return replace(
        unit,
        segments=tuple(SegmentSpec("F32", True, each[4]) for each in layout.segments),
        params=tuple(
            replace(param, segment=slot[0], offset=slot[1])
            for param, slot in zip(params, layout.slots, strict=True)
        ),
    )


def _manifest(world_size: int) -> Manifest:
    """Return a language model of 7 billion parameters, with AdamW."""
    block = {
        **{f"attention.{each}": (HIDDEN, HIDDEN) for each in "qkvo"},
        **{f"mlp.{each}": (11008, HIDDEN) for each in ("up", "gate", "down")},
        "norm1": (HIDDEN,),
        "norm2": (HIDDEN,),
    }
    units = [_unit(f"layers.{i}", block, world_size) for i in range(32)]
    units.append(_unit("head", {"weight": (32000, HIDDEN)}, world_size))
    units.append(_unit("embedding", {"weight": (32000, HIDDEN)}, world_size))
    state = StateSpec({"exp_avg": "F32", "exp_avg_sq": "F32"}, ("step",))
    states = {param.name: state for unit in units for param in unit.params}
    optim = OptimSpec("AdamW", [{"params": list(states), "lr": 0.1}], {}, states)
    return Manifest("0" * 32, world_size, tuple(units), (), optim=optim)


def _plan(document: bytes, new_size: int, rank: int) -> dict[int, int]:
    """Return how many elements ``rank`` of ``new_size`` reads from each saved rank."""
    manifest = parse_manifest(document)
    holders = Holders(manifest)
    numels: dict[int, int] = {}
    for unit in manifest.units:
        layout = make_layout(replace(unit, ranks=tuple(range(new_size))))
        for index, param in enumerate(unit.params):
            begin, end, _, _ = layout.intersect(index, rank)
            expected = begin
            for held in holders.holders(param.name, begin, end):
                assert held.part_begin <= held.begin < held.end <= held.part_end
                assert held.begin == expected
                expected = held.end
                numels[held.rank] = numels.get(held.rank, 0) + held.end - held.begin
            assert expected == end
    return numels


@pytest.mark.parametrize(
    ("world_size", "new_size"), [(4096, 4096), (4096, 4095), (4096, 512), (8, 4096)]
)
def test_a_plan_names_few_ranks(world_size: int, new_size: int) -> None:
    document = _manifest(world_size).dump()
    assert len(document) < 200_000
    for rank in (0, new_size // 3, new_size - 1):
        numels = _plan(document, new_size, rank)
        share = -(-world_size // new_size)
        assert len(numels) <= 34 * (share + 2)


def test_all_ranks_together_read_everything_once() -> None:
    document = _manifest(64).dump()
    plans = [_plan(document, 48, rank) for rank in range(48)]
    manifest = parse_manifest(document)
    total = sum(param.numel for unit in manifest.units for param in unit.params)
    assert sum(sum(plan.values()) for plan in plans) == total


def test_memory_is_that_of_the_manifest_and_of_what_is_read() -> None:
    """64 times the ranks: no more memory, but for the list of their numbers."""
    peaks = []
    for world_size in (64, 4096):
        document = _manifest(world_size).dump()
        tracemalloc.start()
        _plan(document, world_size, world_size // 2)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    per_rank = 100  # bytes of an int in a list, and in a tuple
    assert peaks[1] < 1.2 * peaks[0] + 4096 * per_rank
