"""csrc/nccl under whole models when processes end, or are stopped."""

import re
from pathlib import Path

import pytest

from fakecuda.device import needs_fake
from fakecuda.stopped_store import TIMEOUT_S
from helpers.programs import run_fresh

pytestmark = needs_fake

# Loaded cores, and the post-mortem.
SLACK_S = 30.0
TOLERANCE = 1e-5


@pytest.mark.parametrize("scenario", ["live_model", "live_graph"])
def test_a_process_leaves_its_groups(scenario: str) -> None:
    """With models and graphs that nothing frees, before the device is shut down.

    NCCL finalizes no communicator whose collectives a graph has captured.
    """
    lines = run_fresh("fakecuda.programs", scenario, FAKE_NCCL_TELLS="1").splitlines()
    assert float(lines[0]) < TOLERANCE
    assert len(lines) == 4  # of the ranks and their parent, which has none
    for line in lines[1:]:
        left, _, _ = line.partition(" of ")
        assert int(left) <= 1, line  # the default group's, which torch leaves


@pytest.mark.parametrize("place", ["wrapping", "meeting"])
def test_the_stores_host_is_stopped(place: str, tmp_path: Path) -> None:
    """The group's limit holds although the store never answers.

    In wrapping a thread of torch's already waits for it, without a limit.
    """
    said = run_fresh("fakecuda.stopped_store", str(tmp_path), place)
    found = re.match(r"([\d.]+) s: (.*)", said, re.DOTALL)
    assert found is not None, said
    assert float(found[1]) < TIMEOUT_S + SLACK_S
    assert "meeting of the ranks" in found[2]
    assert "store" in found[2]
