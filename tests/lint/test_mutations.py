"""The planted faults of tests/mutations still have their places in csrc."""

import subprocess
import sys

from helpers.rooms import ROOT


def test_every_fault_applies() -> None:
    run = ROOT / "tests" / "mutations" / "run.py"
    result = subprocess.run(
        [sys.executable, run, "--apply"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
