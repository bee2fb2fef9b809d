"""A save that is killed at any moment leaves the old checkpoint, or the new one.

It is killed 8 times, 50 times with ``--full``, or ``FSDP_C_TEST_NUM_KILLS`` times; and
before every sixth call that changes the disk, before each with ``--full``.
"""

import os
from pathlib import Path

import pytest

from helpers.programs import run_program
from helpers.seeds import seed_of


def test_at_random_moments(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    usual = "50" if pytestconfig.getoption("--full") else "8"
    num_kills = os.environ.get("FSDP_C_TEST_NUM_KILLS", usual)
    run_program("helpers.kill_saves", str(tmp_path), num_kills, str(seed_of("kills")))


def test_before_every_system_call(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    stride = "1" if pytestconfig.getoption("--full") else "6"
    assert "calls of a save" in run_program(
        "helpers.kill_saves", str(tmp_path), "sweep", stride
    )
