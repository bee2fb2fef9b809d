"""A rank is killed, stopped, raises or diverges: what the others are told, and when.

The ranks are processes of their own over gloo; see `helpers.failures`.
"""

import re
from pathlib import Path

import pytest

from helpers.failures import GROUP_TIMEOUT_S, POST_MORTEM_S, Report, Scenario, run
from helpers.impl import needs_fsdp_c

# A rank that runs on two loaded cores may be late by some seconds.
SLACK_S = 15.0
OPERATION = re.compile(r"#\d+ [a-z_]+( \(summon\))? of unit '[\w.-]*'")


def _survivors(scenario: Scenario, folder: Path) -> dict[int, Report]:
    """Run it; return what all but the victim were told, in time."""
    needs_fsdp_c("says so in another way")
    reports = run(scenario, folder)
    told = {r: report for r, report in reports.items() if r != scenario.victim}
    others = set(range(scenario.world_size)) - {scenario.victim}
    assert set(told) == others, (folder / "stderr").read_text()[-3000:]
    for report in told.values():
        assert report.kind in ("RuntimeError", "DistBackendError"), report
        assert 0 <= report.seconds < GROUP_TIMEOUT_S + POST_MORTEM_S + SLACK_S
    return told


def _headline(report: Report) -> str:
    return report.message.split("What each rank issued last")[0]


@pytest.mark.parametrize("place", ["forward", "backward", "summon", "state_dict"])
def test_killed(place: str, tmp_path: Path) -> None:
    """The rank, its process, and the unit that the others waited in are named."""
    told = _survivors(Scenario("kill", place), tmp_path)
    for rank, report in told.items():
        assert report.message.startswith(f"rank {rank} of 3: #")
        assert OPERATION.search(_headline(report)), report.message
        assert re.search(r"Dead: rank 1, process \d+ on this host", report.message)
        assert "rank 1: no answer, dead" in report.message
        assert "must run the same units" not in report.message
        # Closed connections tell, not the time limit.
        assert "Timed out" not in report.message


def test_killed_in_the_optimizer(tmp_path: Path) -> None:
    """The others are at the next thing that communicates: a summon."""
    for report in _survivors(Scenario("kill", "optimizer"), tmp_path).values():
        assert "(summon) of unit" in _headline(report)
        assert "rank 1: no answer, dead" in report.message


@pytest.mark.parametrize(
    ("place", "operation"),
    [
        ("clip", "all_reduce of the norm in clip_grad_norm_"),
        ("optim_state_dict", "comparison of optimizer states"),
    ],
)
def test_killed_outside_of_units(place: str, operation: str, tmp_path: Path) -> None:
    """Collectives that no unit issues are named by what they are for."""
    for report in _survivors(Scenario("kill", place), tmp_path).values():
        assert operation in _headline(report)
        assert "Dead: rank 1, process" in report.message


def test_killed_in_another_replica(tmp_path: Path) -> None:
    """Ranks that share no group with the dead one are told by one that does."""
    scenario = Scenario(
        "kill", "backward", victim=3, world_size=4, strategy="HYBRID_SHARD"
    )
    told = _survivors(scenario, tmp_path)
    for report in told.values():
        assert "Dead: rank 1 (global rank 3), process" in report.message
    assert "failed in another group" in told[0].message


@pytest.mark.parametrize("place", ["forward", "state_dict"])
def test_stopped(place: str, tmp_path: Path) -> None:
    for report in _survivors(Scenario("stop", place), tmp_path).values():
        assert OPERATION.search(_headline(report))
        assert re.search(r"Stopped \(SIGSTOP or a debugger\): rank 1", report.message)
        assert "rank 1: no answer, stopped" in report.message
        assert re.search("Timed out|timeout", _headline(report))


@pytest.mark.parametrize(
    ("action", "state", "store"),
    [
        ("kill", "Dead: rank 0", "store is gone"),
        ("stop", "rank 0, process", "store does not answer"),
    ],
)
def test_the_store_goes_with_the_rank(
    action: str, state: str, store: str, tmp_path: Path
) -> None:
    """Rank 0 has the TCPStore: the others neither hang nor know less about it."""
    scenario = Scenario(action, victim=0, store="tcp")
    for report in _survivors(scenario, tmp_path).values():
        assert state in report.message
        assert store in report.message
        assert OPERATION.search(_headline(report))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("forward", "left forward of unit 'blocks.1' by ValueError: the victim's own"),
        ("backward", "left backward by an exception"),
    ],
)
def test_raised(place: str, words: str, tmp_path: Path) -> None:
    """The rank that raised has its own error; the others learn of it."""
    for report in _survivors(Scenario("raise", place), tmp_path).values():
        assert f"rank 1: {words}" in report.message
        assert "must run the same units" not in report.message


def test_skips_units(tmp_path: Path) -> None:
    """The victim fails too; all say where the ranks parted."""
    needs_fsdp_c("says so in another way")
    reports = run(Scenario("skip"), tmp_path)
    assert set(reports) == {0, 1, 2}
    for report in reports.values():
        assert "they first differ at #" in report.message
        parting = report.message.split("they first differ at #")[1]
        assert "rank 0: all_gather of unit 'blocks.2'" in parting
        assert re.search(r"rank 1: \w+ of unit 'blocks.1'", parting)


def test_other_order(tmp_path: Path) -> None:
    """Units of one size, in another order: noticed late, still located."""
    needs_fsdp_c("says so in another way")
    reports = run(Scenario("reorder"), tmp_path)
    assert set(reports) == {0, 1, 2}
    for report in reports.values():
        parting = report.message.split("they first differ at #")[1]
        assert "rank 0: all_gather of unit 'blocks.1'" in parting
        assert "rank 1: all_gather of unit 'blocks.2'" in parting


def test_going_on_in_a_new_group(tmp_path: Path) -> None:
    """One rank raised: its group is lost, the shards are not."""
    needs_fsdp_c("has no reset()")
    reports = run(Scenario("raise", recovers=True), tmp_path)
    assert set(reports) == {0, 1, 2}
    recovered = sorted(path.stem for path in tmp_path.glob("*.recovered"))
    assert recovered == ["0", "1", "2"], (tmp_path / "stderr").read_text()[-3000:]
