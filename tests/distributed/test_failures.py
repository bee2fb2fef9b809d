"""A rank is killed, stopped, raises or diverges: what the others are told, and when.

The ranks are processes of their own, over shared memory and gloo, or on GPUs over NCCL;
see `helpers.failures`. Scenarios that `_cases` calls rare run with ``--full``: they
rarely find anything new beside others here, or what tests/c/test_shm_failures.c and
test_hierarchical.c find without a model.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fakecuda.device import IS_HERE as IS_FAKE
from helpers.distributed import TEST_DEVICE
from helpers.failures import GROUP_TIMEOUT_S, POST_MORTEM_S, Report, Scenario, Starter

# Ranks on loaded cores may be late; without a post-mortem they would wait for 60 s.
SLACK_S = 40.0
# In wrapping a rank that began another wait would take seconds more for each.
WRAPPING_SLACK_S = 6.0
OPERATION = re.compile(r"#\d+ [a-z_]+( \(summon\))? of unit '[\w.-]*'")
# Where the others meet the victim: there, or next, if they have all they need of it.
WAITED_IN = re.compile(
    rf"{OPERATION.pattern}|state_dict\(\) of unit '\w+'|comparison of optimizer states"
)
# What gloo and shm say when a group's time is over.
TIME_LIMIT = re.compile(
    r"Timed out|timeout|waited \d+\.\d s .* raise the time limit|within the time limit"
)


@dataclass(frozen=True)
class Trial:
    """Where scenarios run, and over what."""

    starter: Starter
    transport: str
    folder: Path

    def run(
        self, action: str, place: str = "forward", **kwargs: Any
    ) -> dict[int, Report]:
        scenario = Scenario(action, place, transport=self.transport, **kwargs)
        return self.starter.run(scenario, self.folder)

    def survivors(
        self, action: str, place: str = "forward", *, victim: int = 1, **kwargs: Any
    ) -> dict[int, Report]:
        """Return what all but the victim were told, in time."""
        told = self.run(action, place, victim=victim, **kwargs)
        told.pop(victim, None)
        others = set(range(kwargs.get("world_size", 3))) - {victim}
        assert set(told) == others, self.stderr()
        for report in told.values():
            assert report.kind in ("RuntimeError", "DistBackendError"), report
            assert 0 <= report.seconds < GROUP_TIMEOUT_S + POST_MORTEM_S + SLACK_S
        return told

    def is_met_in(self, operation: str, report: Report) -> bool:
        """Whether a report is about ``operation``, in which a host waits.

        On a device it does not wait there, and is told at the next place.
        """
        headline = _headline(report)
        if self.transport == "nccl":
            return WAITED_IN.search(headline) is not None
        return operation in headline

    def stderr(self) -> str:
        """Return what the ranks printed last."""
        return (self.folder / "stderr").read_text(errors="replace")[-3000:]


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """The process that all ranks of this file are forked from."""
    made = Starter(tmp_path_factory.mktemp("starter"))
    yield made
    made.close()


@pytest.fixture
def trial(starter: Starter, transport: str, tmp_path: Path) -> Trial:
    return Trial(starter, transport, tmp_path)


def _cases(
    names: str | tuple[str, ...],
    *,
    usual: dict[str, tuple[Any, ...]],
    rare: dict[str, tuple[Any, ...]] | None = None,
) -> pytest.MarkDecorator:
    """Give the test cases by transport; rare ones run with ``--full``.

    On a GPU all of them are over NCCL.
    """
    all_names = (names,) if isinstance(names, str) else names
    if TEST_DEVICE == "cuda":
        usual, rare = _over_nccl(usual), _over_nccl(rare or {})
        rare = {"nccl": tuple(c for c in rare["nccl"] if c not in usual["nccl"])}
    return pytest.mark.parametrize(
        ("transport", *all_names),
        [
            pytest.param(
                transport,
                *((case,) if isinstance(case, str) else case),
                marks=marks,
                id=f"{transport}-{case if isinstance(case, str) else case[0]}",
            )
            for cases, marks in ((usual, ()), (rare or {}, pytest.mark.only_full))
            for transport in cases
            for case in cases[transport]
        ],
    )


def _over_nccl(cases: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    of_any: list[Any] = []
    for each in (case for its in cases.values() for case in its):
        if each not in of_any:
            of_any.append(each)
    return {"nccl": tuple(of_any)}


def _headline(report: Report) -> str:
    return report.message.split("What each rank issued last")[0]


@_cases(
    "place",
    usual={"shm": ("forward",), "c10d": ("state_dict",)},
    rare={
        "shm": ("backward", "summon", "state_dict"),
        "c10d": ("forward", "backward", "summon"),
    },
)
def test_killed(trial: Trial, place: str) -> None:
    """The rank, its process, and what the others waited in are named."""
    for rank, report in trial.survivors("kill", place).items():
        assert report.message.startswith(f"rank {rank} of 3: ")
        assert WAITED_IN.search(_headline(report)), report.message
        assert re.search(r"Dead: rank 1, process \d+ on this host", report.message)
        assert "rank 1: no answer, dead" in report.message
        assert "must run the same units" not in report.message
        # Closed connections or the process's state tell, not the time limit.
        assert not TIME_LIMIT.search(report.message)


@pytest.mark.cpu_only("hosts are told apart on the CPU")
@_cases(
    "place",
    usual={},
    rare={"hierarchical": ("forward", "backward")},
)
def test_killed_on_another_host(trial: Trial, place: str) -> None:
    """The ranks of both hosts end, and name the rank."""
    told = trial.survivors("kill", place, victim=3, world_size=4)
    for rank, report in told.items():
        assert report.message.startswith(f"rank {rank} of 4: ")
        assert WAITED_IN.search(_headline(report)), report.message
        assert re.search(r"Dead: rank 3, process \d+ on this host", report.message)
        assert not TIME_LIMIT.search(report.message)


@_cases(
    "place",
    usual={"c10d": ("backward",)},
    rare={"shm": ("forward", "backward"), "c10d": ("forward",)},
)
def test_killed_in_fully_shard(trial: Trial, place: str) -> None:
    for rank, report in trial.survivors("kill", place, strategy="fully_shard").items():
        assert report.message.startswith(f"rank {rank} of 3: ")
        assert OPERATION.search(_headline(report)), report.message
        assert re.search(r"Dead: rank 1, process \d+ on this host", report.message)


@_cases("place", usual={"shm": ("optimizer",)}, rare={"c10d": ("optimizer",)})
def test_killed_between_collectives(trial: Trial, place: str) -> None:
    """The others are at the next thing that communicates: a summon."""
    for report in trial.survivors("kill", place).values():
        assert trial.is_met_in("(summon) of unit", report)
        assert "rank 1: no answer, dead" in report.message


_CLIP = ("clip", "all_reduce of the norm in clip_grad_norm_")
_STATES = ("optim_state_dict", "comparison of optimizer states")


@_cases(
    ("place", "operation"),
    usual={"shm": (_CLIP,), "c10d": (_STATES,)},
    rare={"shm": (_STATES,), "c10d": (_CLIP,)},
)
def test_killed_outside_of_units(trial: Trial, place: str, operation: str) -> None:
    """Collectives that no unit issues are named by what they are for."""
    for report in trial.survivors("kill", place).values():
        assert trial.is_met_in(operation, report)
        assert "Dead: rank 1, process" in report.message


@pytest.mark.cpu_only("torch's watchdog ends ranks that wait in collectives of torch")
@_cases("place", usual={"shm": ("backward",)}, rare={"c10d": ("backward",)})
def test_killed_in_another_replica(trial: Trial, place: str) -> None:
    """Ranks that share no group with the dead one are told by one that does.

    Not by its end: it stays.
    """
    told = trial.survivors(
        "kill", place, victim=3, world_size=4, strategy="HYBRID_SHARD", stays=True
    )
    for report in told.values():
        assert "Dead: rank 1 (global rank 3), process" in report.message
        assert not TIME_LIMIT.search(report.message)
    assert "failed in another group" in told[0].message


@_cases(
    "place",
    usual={"shm": ("forward",)},
    rare={"shm": ("state_dict",), "c10d": ("forward", "state_dict")},
)
def test_stopped(trial: Trial, place: str) -> None:
    for report in trial.survivors("stop", place).values():
        assert WAITED_IN.search(_headline(report))
        assert re.search(r"Stopped \(SIGSTOP or a debugger\): rank 1", report.message)
        assert "rank 1: no answer, stopped" in report.message
        assert TIME_LIMIT.search(_headline(report))


_MEETING = "meeting of the ranks, before the group's first collective"
_SYNC = "broadcast of module states"
# In the first of these the others wait in their first forward.
_STAGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "wrapping": ("construction", _MEETING, {}),
    "broadcast": ("construction", _SYNC, {"syncs": True}),
    "before": ("before", _SYNC, {"syncs": True}),
    "meeting": ("meeting", _MEETING, {}),
}
# It stops, too, and answers no more.
_STORE = {"store": "tcp", "victim": 0}


def _wrapping(stage: str, action: str, **options: Any) -> tuple[Any, ...]:
    place, operation, of_stage = _STAGES[stage]
    where = f"{stage}-{action}" + "-store" * ("store" in options)
    return where, action, place, operation, of_stage | options


_WRAPPINGS = tuple(
    _wrapping(stage, action, **options)
    for stage in _STAGES
    for action, options in (
        ("kill", {}),
        ("stop", {}),
        ("raise", {"stays": True}),
        ("kill", _STORE),
        ("stop", _STORE),
    )
)
_OFTEN = {
    "shm": ("broadcast-kill",),
    "c10d": ("meeting-stop-store",),
    "hierarchical": (),
}


def _wrappings(*, often: bool) -> dict[str, tuple[Any, ...]]:
    return {
        transport: tuple(each for each in _WRAPPINGS if (each[0] in names) is often)
        for transport, names in _OFTEN.items()
    }


@_cases(
    ("where", "action", "place", "operation", "options"),
    usual=_wrappings(often=True),
    rare=_wrappings(often=False),
)
def test_in_wrapping(
    trial: Trial,
    where: str,
    action: str,
    place: str,
    operation: str,
    options: dict[str, Any],
) -> None:
    """Before there was any step: one time limit for all that a rank waits for."""
    if trial.transport == "nccl" and operation == _SYNC:
        pytest.skip("torch waits without a limit for the ranks of its communicator")
    for report in trial.survivors(action, place, world_size=4, **options).values():
        assert operation in _headline(report), where
        assert report.seconds < GROUP_TIMEOUT_S + POST_MORTEM_S + WRAPPING_SLACK_S
        if not options.get("stays"):
            ended = report.end_seconds - report.seconds
            assert 0 <= ended < WRAPPING_SLACK_S


@pytest.mark.cpu_only("the words are those of the CPU's transports")
@pytest.mark.parametrize("transport", ["hierarchical"])
def test_late_for_each_wait(trial: Trial) -> None:
    """Late for three waits of one meeting: for each in time, for all of them not.

    Of a meeting on one host: tests/c/test_shm_meetings.c.
    """
    words = ("host/", "gathers/", "sums/")
    told = trial.survivors("late", "meeting", world_size=4, words=words, victim=3)
    headline = _headline(told[1])  # of the victim's peer on the other host
    assert _MEETING in headline
    assert TIME_LIMIT.search(headline), headline


@_cases("place", usual={"c10d": ("before",)})
def test_making_groups(trial: Trial, place: str) -> None:
    """The groups that HYBRID_SHARD makes have the default group's time limit."""
    options = {"strategy": "HYBRID_SHARD", "makes_groups": True, "world_size": 4}
    for report in trial.survivors("kill", place, **options).values():
        assert "making of the groups of HYBRID_SHARD" in _headline(report)
        assert "rank 1: no answer" in report.message
        assert report.seconds < GROUP_TIMEOUT_S + POST_MORTEM_S + WRAPPING_SLACK_S


_STORE_DIES = ("kill", "Dead: rank 0", "store is gone")
_STORE_STOPS = ("stop", "rank 0, process", "store does not answer")


@_cases(
    ("action", "state", "store"),
    usual={"shm": (_STORE_STOPS,), "c10d": (_STORE_DIES,)},
    rare={"shm": (_STORE_DIES,), "c10d": (_STORE_STOPS,)},
)
def test_the_store_goes_with_the_rank(
    trial: Trial, action: str, state: str, store: str
) -> None:
    """Rank 0 has the TCPStore: the others neither hang nor know less about it."""
    for report in trial.survivors(action, victim=0, store="tcp").values():
        assert state in report.message
        assert store in report.message
        assert WAITED_IN.search(_headline(report))


_IN_FORWARD = (
    "forward",
    "left forward of unit 'blocks.1' by ValueError: the victim's own",
)
_IN_BACKWARD = ("backward", "left backward by an exception")


@_cases(
    ("place", "words"),
    usual={"c10d": (_IN_BACKWARD,)},
    rare={"shm": (_IN_FORWARD, _IN_BACKWARD), "c10d": (_IN_FORWARD,)},
)
def test_raised(trial: Trial, place: str, words: str) -> None:
    """The rank that raised has its own error; the others learn of it."""
    # On a device a thread of autograd tells them of backward, a moment later.
    stays = trial.transport == "nccl"
    for report in trial.survivors("raise", place, stays=stays).values():
        assert f"rank 1: {words}" in report.message
        assert "must run the same units" not in report.message


_PARTINGS = {
    "skip": ("blocks.2", r"\w+ of unit 'blocks.1'"),
    "reorder": ("blocks.1", r"all_gather of unit 'blocks.2'"),
}
# NCCL exchanges other units of one size without an error; the fake compares more.
_IS_NCCL = TEST_DEVICE == "cuda" and not IS_FAKE


@_cases(
    "action",
    usual={"c10d": ("skip",) if _IS_NCCL else ("skip", "reorder")},
    rare={} if _IS_NCCL else {"shm": ("skip", "reorder")},
)
def test_diverged(trial: Trial, action: str) -> None:
    """The victim fails too; all say where the ranks parted.

    gloo notices other units of one size late.
    """
    ours, theirs = _PARTINGS[action]
    reports = trial.run(action, stays=True)
    assert set(reports) == {0, 1, 2}
    messages = [report.message for report in reports.values()]
    told = [message for message in messages if "they first differ" in message]
    # On a device hosts may have come to the exchange of the state dict, which knows of
    # no units before it.
    if trial.transport == "nccl" and len(told) < len(reports):
        assert all("The ranks are at different units" in each for each in messages)
        assert all("state_dict() of unit" in each for each in messages)
    else:
        assert len(told) == len(reports)
    for message in told:
        assert "different units" in message
        assert "TORCH_DISTRIBUTED_DEBUG" in message
        parting = message.split("they first differ at #")[1]
        assert re.search(f"rank [02]: all_gather of unit '{ours}'", parting)
        assert re.search(f"rank 1: {theirs}", parting)


@pytest.mark.cpu_only("behind a failure a device goes on with what is in memory")
@_cases("place", usual={"shm": ("forward",)}, rare={"c10d": ("forward",)})
def test_going_on_in_a_new_group(trial: Trial, place: str) -> None:
    """One rank raised: its group is lost, the shards are not."""
    reports = trial.run("raise", place, recovers=True)
    assert set(reports) == {0, 1, 2}
    recovered = sorted(path.stem for path in trial.folder.glob("*.recovered"))
    assert recovered == ["0", "1", "2"], trial.stderr()
