"""csrc/nccl under whole models when processes end, or are stopped."""

import re
from pathlib import Path

import pytest

from helpers.accelerator import ACCELERATOR
from helpers.nccl_ranks import TIMEOUT_S
from helpers.programs import run_fresh
from simdevice.build import build_fake_nccl

# Loaded cores, and the post-mortem.
SLACK_S = 30.0


def run(folder: Path, scenario: str) -> str:
    """Return what rank 1 printed."""
    return run_fresh(
        "helpers.nccl_ranks",
        str(folder),
        scenario,
        FSDP_C_NCCL_LIBRARY=str(build_fake_nccl()),
        FAKE_NCCL_TELLS="1",
        FSDP_C_POST_MORTEM_SECONDS="1",
    )


@pytest.mark.skipif(ACCELERATOR != "sim", reason="its program loads that device")
def test_models_that_nothing_frees(tmp_path: Path) -> None:
    """Before the device is shut down, the process leaves its groups by itself."""
    assert run(tmp_path, "leaks") == "0 of 1 communicators left\n"


def test_the_stores_host_is_stopped_before_the_ranks_meet(tmp_path: Path) -> None:
    """The group's limit holds although the store never answers."""
    said = re.match(r"([\d.]+) s: (.*)", run(tmp_path, "store"), re.DOTALL)
    assert said is not None
    assert float(said[1]) < TIMEOUT_S + SLACK_S
    assert "meeting of the ranks" in said[2]
    assert "store" in said[2]
