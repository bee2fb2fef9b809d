"""Runs a module of the helpers as a program of its own."""

import os
import subprocess
import sys

from helpers.distributed import TESTS_DIR


def run_program(module: str, *words: str, **env: str) -> str:
    """Run ``python -m module words...``; return what it printed."""
    paths = [str(TESTS_DIR), *(path or os.getcwd() for path in sys.path)]
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
