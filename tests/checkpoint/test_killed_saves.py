"""A save that is killed at any moment leaves the old checkpoint, or the new one.

It is killed 15 times, 50 times with ``--full``, or ``FSDP_C_TEST_NUM_KILLS`` times.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.distributed import TESTS_DIR
from helpers.seeds import seed_of

pytestmark = pytest.mark.cpu_only("its ranks are processes of its own, on the CPU")


def _run(*words: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    paths = [str(TESTS_DIR), *(path or os.getcwd() for path in sys.path)]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, "-m", "helpers.kill_saves", *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def test_at_random_moments(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    usual = "50" if pytestconfig.getoption("--full") else "15"
    num_kills = os.environ.get("FSDP_C_TEST_NUM_KILLS", usual)
    num_kills = os.environ.get("FSDP_C_TEST_NUM_KILLS", "50")
    _run(str(tmp_path), num_kills, str(seed_of("kills")))


def test_before_every_system_call(tmp_path: Path) -> None:
    assert "calls of a save" in _run(str(tmp_path), "sweep")
