"""Random models, sharded and trained at random, against the unsharded model.

The message of a failure holds the seed and the program. More cases:

    FSDP_C_RANDOM_CASES=5000 pytest tests/distributed/test_random_models.py
    FSDP_C_RANDOM_FIRST=123 FSDP_C_RANDOM_CASES=1 pytest ...   # one of them
    FSDP_C_RANDOM_WITHOUT=adapter,toggle pytest ...   # behind a known bug
"""

import itertools
from collections.abc import Callable

import pytest
import torch

from helpers.distributed import run_task
from helpers.groups import groups_destroyed
from helpers.random_models import BRANCHES, LEAVES
from helpers.random_programs import (
    FSDP1,
    FULLY_SHARD,
    LOSSES,
    PRECISIONS,
    WORLD_SIZES,
    Api,
    Program,
    batches_of,
    draw_flat_program,
    draw_row_program,
    left_out,
)
from helpers.random_runs import run_program


def run_case(
    rank: int, world_size: int, draw: Callable[[int], Program], seed: int
) -> None:
    """Run a program; a failure names its seed."""
    program = draw(seed)
    torch.manual_seed(seed)
    try:
        with groups_destroyed():
            run_program(program)
    except Exception as error:
        raise AssertionError(f"{error}\ncase {seed}: {program.show()}") from error


@pytest.mark.parametrize(
    ("world_size", "cases"), batches_of(num_short=24, num_full=24, size=10)
)
def test_fsdp1(world_size: int, cases: tuple[int, ...]) -> None:
    """Losses, gradients, norms, parameters and state dicts."""
    for seed in cases:
        run_task(run_case, world_size, {"draw": draw_flat_program, "seed": seed})


@pytest.mark.parametrize(
    ("world_size", "cases"), batches_of(num_short=6, num_full=1000, size=12)
)
def test_fully_shard(world_size: int, cases: tuple[int, ...]) -> None:
    """The same of the other API."""
    for seed in cases:
        run_task(run_case, world_size, {"draw": draw_row_program, "seed": seed})


@pytest.mark.bookkeeping
@pytest.mark.parametrize(
    ("api", "draw"), [(FSDP1, draw_flat_program), (FULLY_SHARD, draw_row_program)]
)
def test_programs_cover_everything(api: Api, draw: Callable[[int], Program]) -> None:
    """A hundred cases hold every kind of node, every mode and every event."""
    programs = [draw(case) for case in range(100)]
    steps = [step for program in programs for step in program.steps]
    gone = left_out() | {*api.without}
    kinds = set().union(*(program.root.kinds() for program in programs))
    assert kinds == set(LEAVES + BRANCHES) - gone
    assert {step.sync for step in steps} == set(api.syncs) - gone
    assert {step.inside for step in steps} - {""} == set(api.inside) - gone
    assert {step.between for step in steps} - {""} == set(api.between) - gone
    assert {step.before_step for step in steps} - {""} == set(api.before_step) - gone
    after = set(itertools.chain.from_iterable(step.after for step in steps))
    assert after == set(api.after) - gone
    assert {step.losses for step in steps} == set(LOSSES)
    assert {p.world_size for p in programs} == set(WORLD_SIZES)
    if not left_out():
        assert {p.world_size for p in programs if p.dim > 13} == set(WORLD_SIZES)
        assert {p.precision for p in programs} == set(PRECISIONS) - gone
        assert {p.num_tp for p in programs} == {None, 1, 2, 3, 4}
        assert {p.mesh for p in programs if p.num_tp is None} == {
            *((2,), (3,), (4,), (1, 2), (2, 1), (1, 3), (3, 1)),
            *((1, 4), (2, 2), (4, 1)),
        }
        assert {p.offloads for p in programs} == {True, False}
