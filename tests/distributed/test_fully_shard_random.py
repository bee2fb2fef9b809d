"""Random programs under ``fully_shard``, in fp64 against the unsharded model, to 1e-8.

pytest --full tests/distributed/test_fully_shard_random.py       # 1,000 cases
FSDP_C_RANDOM_FIRST=123 FSDP_C_RANDOM_CASES=1 pytest ...         # one of them
"""

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from helpers.distributed import run_task
from helpers.groups import groups_destroyed
from helpers.random_rows import draw_row_program, draw_world_size
from helpers.row_runs import run_row_program

FIRST_CASE = int(os.environ.get("FSDP_C_RANDOM_FIRST", "0"))
NUM_SHORT_CASES = 6
NUM_CASES = int(os.environ.get("FSDP_C_RANDOM_CASES", NUM_SHORT_CASES))
NUM_FULL_CASES = 1000
BATCH = 12


def run_case(rank: int, world_size: int, seed: int) -> None:
    """Run a program; a failure names its seed."""
    program = draw_row_program(seed)
    torch.manual_seed(seed)
    try:
        with groups_destroyed():
            run_row_program(program)
    except Exception as error:
        raise AssertionError(f"{error}\ncase {seed}: {program.show()}") from error


def _batches() -> Iterator[Any]:
    """Yield (world size, cases); all but the first cases only with --full."""
    is_all = "FSDP_C_RANDOM_FIRST" not in os.environ and NUM_CASES == NUM_SHORT_CASES
    count = NUM_FULL_CASES if is_all else NUM_CASES
    sizes = {
        seed: draw_world_size(random.Random(seed))
        for seed in range(FIRST_CASE, FIRST_CASE + count)
    }
    for is_full in (False, True):
        for world_size in (2, 3, 4):
            mine = [
                seed
                for seed, size in sizes.items()
                if size == world_size and (seed - FIRST_CASE >= NUM_CASES) == is_full
            ]
            for begin in range(0, len(mine), BATCH):
                batch = tuple(mine[begin : begin + BATCH])
                marks = [pytest.mark.only_full] if is_full else []
                yield pytest.param(
                    world_size, batch, id=f"{world_size}-{batch[0]}", marks=marks
                )


@pytest.mark.parametrize(("world_size", "cases"), list(_batches()))
def test_random_models(world_size: int, cases: tuple[int, ...]) -> None:
    """Parameters and gradients after each step."""
    for seed in cases:
        run_task(run_case, world_size, {"world_size": world_size, "seed": seed})
