"""Random programs under ``fully_shard``, in fp64 against the unsharded model, to 1e-8.

pytest --full tests/distributed/test_fully_shard_random.py       # 1,000 cases
FSDP_C_RANDOM_FIRST=123 FSDP_C_RANDOM_CASES=1 pytest ...         # one of them
"""

import random

import pytest
import torch

from helpers.distributed import run_task
from helpers.groups import groups_destroyed
from helpers.random_programs import batches_of
from helpers.random_rows import draw_row_program, draw_world_size
from helpers.row_runs import run_row_program

BATCHES = batches_of(
    lambda seed: draw_world_size(random.Random(seed)),
    num_short=6,
    num_full=1000,
    size=12,
)


def run_case(rank: int, world_size: int, seed: int) -> None:
    """Run a program; a failure names its seed."""
    program = draw_row_program(seed)
    torch.manual_seed(seed)
    try:
        with groups_destroyed():
            run_row_program(program)
    except Exception as error:
        raise AssertionError(f"{error}\ncase {seed}: {program.show()}") from error


@pytest.mark.parametrize(("world_size", "cases"), BATCHES)
def test_random_models(world_size: int, cases: tuple[int, ...]) -> None:
    """Parameters and gradients after each step."""
    for seed in cases:
        run_task(run_case, world_size, {"world_size": world_size, "seed": seed})
