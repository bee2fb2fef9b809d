"""Large models: the work grows as the model does, and sizes are 64 bits wide.

Calls are counted (`helpers.scale`), and layouts and plans compared with arithmetic. The
sizes of very large models run with ``--full``.
"""

import json
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_c import _native
from fsdp_c.tools.plan import plan_model
from fsdp_c.tools.plan._models import ModelSource
from helpers.programs import run_program

FACTOR = 4
GIB = 1 << 30


CASES = {"units": 80, "shared": 40, "ignored": 40, "params": 400}


def _measured(measure: str, **sizes: int) -> dict[str, dict[str, list[float]]]:
    """Return of each kind of model the sums of its phases, at both sizes."""
    words = [f"{kind}:{size // FACTOR}:{size}" for kind, size in sizes.items()]
    sums: dict[str, dict[str, list[float]]] = json.loads(
        run_program("helpers.scale", measure, *words)
    )
    return sums


def test_calls_grow_with_the_model() -> None:
    """Four times the units, or parameters of one: at most four times the calls."""
    for kind, counts in _measured("calls", **CASES).items():
        assert counts["construction"][0] > CASES[kind] // FACTOR  # calls were counted
        for phase, (few, many) in counts.items():
            words = f"{kind}, {phase}: {few} calls, then {many}"
            assert many <= 1.05 * FACTOR * few, words


@pytest.mark.only_full
@pytest.mark.parametrize(("kind", "large"), [("units", 2_000), ("params", 10_000)])
def test_time_grows_with_the_model(kind: str, large: int) -> None:
    """At the sizes of very large models, loops in C included.

    Of work that grows with the square it would be 16 times the time.
    """
    for phase, (few, many) in _measured("seconds", **{kind: large})[kind].items():
        if (kind, phase) == ("units", "load_state_dict"):
            continue  # torch compares all keys with each child's name
        assert many <= 2 * FACTOR * few, f"{phase}: {few:.3f} s, then {many:.3f} s"


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_layout_beyond_31_bits(world_size: int) -> None:
    """Offsets and parts of a unit of 2^31 + 3 elements and more."""
    numels = [(1 << 31) + 3, 5, 1 << 32]
    layout = _native.Layout(
        [(numel, torch.float32, True) for numel in numels],
        world_size,
        align_params=False,
        align_shards=False,
    )
    total = sum(numels)
    shard = -(-total // world_size)
    assert layout.segments[0][3:] == (total, shard, shard * world_size)
    offset = 0
    for index, numel in enumerate(numels):
        assert layout.slots[index] == (0, offset, numel)
        parts = layout.parts(index)
        for rank, (begin, end) in enumerate(parts):
            low = min(max(rank * shard - offset, 0), numel)
            high = min(max((rank + 1) * shard - offset, 0), numel)
            assert end - begin == high - low
            if high > low:
                assert (begin, end) == (low, high)
                assert layout.intersect(index, rank)[2:] == (
                    offset + low - rank * shard,
                    offset + high - rank * shard,
                )
        offset += numel


def test_plan_of_a_parameter_of_3_gib() -> None:
    """What a rank holds, in bytes; and of one of 2^33 elements, 32 GiB."""
    for nbytes, world_size in ((3 * GIB, 2), (32 * GIB, 8)):
        rows = nbytes // 4096

        def make(_batch: int, _sequence: int, rows: int = rows) -> Any:
            return nn.Linear(1024, rows, bias=False), None

        source = ModelSource("large", make)
        (rank,) = plan_model(source, [world_size]).ranks
        assert rank.shard_nbytes == nbytes // world_size
