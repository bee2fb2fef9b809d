"""The scripts of examples/ that need torch alone, as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def losses_of(out: Path, num_ranks: int, *options: str) -> list[float]:
    """Run train_fully_shard.py for a few steps; return what it printed."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node")
    words = ("-m", *torchrun, str(num_ranks), "examples/train_fully_shard.py")
    few = ("--context", "16", "--batch", "2", "--out", str(out))
    env = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    result = subprocess.run(
        [sys.executable, *words, *few, *options],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-4000:]
    return [float(x) for x in re.findall(r"step +\d+ +loss ([0-9.]+)", output)]


@pytest.mark.only_full
def test_tensor_parallel(tmp_path: Path) -> None:
    """--tp 2 on four processes trains as two do, and goes on as they would."""
    plain = losses_of(tmp_path / "plain", 2, "--steps", "2")
    parallel = losses_of(tmp_path / "parallel", 4, "--tp", "2", "--steps", "2")
    assert parallel == pytest.approx(plain, abs=2e-4)
    resume = ("--steps", "4", "--resume")
    again = losses_of(tmp_path / "plain", 4, "--tp", "2", *resume)
    assert losses_of(tmp_path / "parallel", 2, *resume) == pytest.approx(
        again, abs=2e-3
    )
