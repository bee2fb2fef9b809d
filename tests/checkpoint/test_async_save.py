"""Saves that write in a thread: what they hold, how they end, who waits."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_c import checkpoint
from fsdp_c.checkpoint import _files, _save
from helpers.distributed import distributed
from helpers.ending_saves import (
    EXIT_S,
    FAILING_RANK,
    HUNG_TIMEOUT_S,
    LATE,
    SCENARIOS,
    WORLD_SIZE,
)
from helpers.impl import fsdp
from helpers.models import MLP, Block
from helpers.programs import run_fresh
from helpers.reference import assert_same_tensors, full_state_dict

# Loaded cores. A fault took over 40 s.
EXIT_SLACK_S = 15.0


def _model() -> tuple[Any, torch.optim.Optimizer]:
    model = fsdp(MLP(), units={Block}, use_orig_params=True)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, optim)
    return model, optim


def _step(model: Any, optim: torch.optim.Optimizer) -> None:
    optim.zero_grad()
    model(torch.randn(4, 6)).sum().backward()
    optim.step()


@contextlib.contextmanager
def _writes_held() -> Iterator[threading.Event]:
    """Hold the writing threads of this process until the event is set."""
    may_write = threading.Event()
    write = os.writev

    def wait_and_write(*arguments: Any) -> int:
        assert may_write.wait(30)
        return write(*arguments)

    with mock.patch.object(_files.os, "writev", wait_and_write):
        yield may_write


@contextlib.contextmanager
def _writes_delayed() -> Iterator[None]:
    with _writes_held() as may_write:
        timer = threading.Timer(0.2, may_write.set)
        timer.start()
        yield
        timer.join()


@distributed(world_size=2)
def test_training_goes_on_meanwhile(tmp_path: Path) -> None:
    """What was at the call is saved, although it is written later."""
    model, optim = _model()
    expected = {k: v.clone() for k, v in full_state_dict(model).items()}
    with _writes_held() as may_write:
        handle = checkpoint.save(tmp_path / "c", model, optim, blocking=False)
        _step(model, optim)
        assert not handle.done()
        assert not (tmp_path / "c").exists()
        with pytest.raises(TimeoutError):
            handle.result(timeout=0.01)
        dist.barrier()
        may_write.set()
        assert handle.result() == str(tmp_path / "c")
    assert handle.done()
    dist.barrier()
    checkpoint.verify(tmp_path / "c")
    assert [each.name for each in tmp_path.iterdir()] == ["c"]
    checkpoint.load(tmp_path / "c", model, optim)
    assert_same_tensors("state", full_state_dict(model), expected, 0.0)


@distributed(world_size=2)
def test_a_load_waits(tmp_path: Path) -> None:
    """Of what is still being written, too."""
    model, optim = _model()
    with _writes_delayed():
        checkpoint.save(tmp_path / "c", model, optim, extra=1, blocking=False)
        assert checkpoint.load(tmp_path / "c", model, optim).extra == 1


@distributed(world_size=2)
def test_the_next_save_waits(tmp_path: Path) -> None:
    model, optim = _model()
    with _writes_delayed():
        first = checkpoint.save(tmp_path / "c", model, optim, blocking=False)
        second = checkpoint.save(tmp_path / "c", model, optim, blocking=False)
        assert first.done()
        second.result()
    checkpoint.verify(tmp_path / "c")


def test_rank_0_publishes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it sees a rank's entry, before that rank has gone on."""
    folder, place = tmp_path / "saving", tmp_path / "saved"
    folder.mkdir()
    (folder / "entry.new").write_bytes(b"1")
    rename = os.rename

    def publish_after(old: str, new: str) -> None:
        rename(old, new)
        rename(folder, place)

    monkeypatch.setattr(os, "rename", publish_after)
    _files.rename_durably(str(folder / "entry.new"), str(folder / "entry"))
    assert (place / "entry").read_bytes() == b"1"


@distributed(world_size=2)
def test_an_error_that_nobody_asked_for(rank: int, tmp_path: Path) -> None:
    """It is raised by the next save, on all ranks, once."""
    model, optim = _model()
    error = OSError(5, "Input/output error") if rank == 1 else None
    with mock.patch.object(_files.os, "writev", wraps=os.writev, side_effect=error):
        handle = checkpoint.save(tmp_path / "a", model, optim, blocking=False)
        while not handle.done():
            time.sleep(0.01)
    dist.barrier()
    with pytest.raises(checkpoint.CheckpointError, match=r"(?s)before this.*output"):
        checkpoint.save(tmp_path / "b", model, optim)
    assert list(tmp_path.iterdir()) == []
    checkpoint.save(tmp_path / "b", model, optim)
    checkpoint.verify(tmp_path / "b")
    with pytest.raises(checkpoint.CheckpointError):
        handle.result()


@distributed(world_size=2)
def test_a_file_that_is_lost(rank: int, tmp_path: Path) -> None:
    """Rank 0 sees the entry of rank 1, and not its tensors: no shared file system."""
    model, optim = _model()
    wait = _save._Job._wait_for_entries

    def wait_and_lose(job: Any, deadline: float) -> None:
        wait(job, deadline)
        os.unlink(os.path.join(job.folder, _files.rank_file(1, 2)))

    with mock.patch.object(_save._Job, "_wait_for_entries", wait_and_lose):
        handle = checkpoint.save(tmp_path / "c", model, optim, blocking=False)
        seen = "rank 0 does not see rank-00001" if rank == 0 else "another rank failed"
        with pytest.raises(checkpoint.CheckpointError, match=seen):
            handle.result()
    assert not (tmp_path / "c").exists()


@distributed(world_size=2)
def test_a_rank_that_does_not_come(rank: int, tmp_path: Path) -> None:
    """The others give up in time and say who is missing."""
    model, optim = _model()
    with _writes_held() as may_write:
        if rank == 0:
            may_write.set()
        handle = checkpoint.save(
            tmp_path / "a", model, optim, blocking=False, timeout=0.3
        )
        if rank == 0:
            with pytest.raises(
                checkpoint.CheckpointError, match=r"1 ranks did not .* rank-00001-of"
            ):
                handle.result()
        dist.barrier()
        may_write.set()
        if rank == 1:
            with pytest.raises(checkpoint.CheckpointError):
                handle.result()
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.bookkeeping
def test_waits_grow_no_longer_than_a_quarter_second() -> None:
    job = object.__new__(_save._Job)
    job.ending = SimpleNamespace(  # type: ignore[assignment]
        is_set=lambda: False, wait=lambda seconds: False
    )
    waits = [_save._FIRST_WAIT_S]
    for _ in range(20):
        waits.append(job._pause(waits[-1]))
    assert waits == sorted(waits)
    assert waits[-1] == _save._LONGEST_WAIT_S == 0.25


@dataclass(frozen=True)
class Ended:
    """How the ranks of a scenario of `helpers.ending_saves` ended."""

    folder: Path
    statuses: tuple[int | str, ...]
    seconds: tuple[float, ...]
    log: str

    def check(self, of_failing_rank: int | str) -> None:
        """Assert who ended how, within the bound, and that nothing else is left."""
        expected: list[int | str] = [0] * WORLD_SIZE
        expected[FAILING_RANK] = of_failing_rank
        assert list(self.statuses) == expected, self.log
        assert self.seconds[0] >= 0
        limit_s = HUNG_TIMEOUT_S + EXIT_S + EXIT_SLACK_S
        assert max(self.seconds) < limit_s, self.seconds
        names = {each.name for each in self.folder.iterdir()}
        assert names <= {"c", "store", "stderr"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("ended")
    env = {"OMP_NUM_THREADS": "1"}
    output = run_fresh("helpers.ending_saves", str(folder), *SCENARIOS, **env)
    return {
        name: Ended(
            folder / name,
            *zip(*ends, strict=True),
            (folder / name / "stderr").read_text(),
        )
        for name, ends in json.loads(output).items()
    }


@pytest.mark.bookkeeping
def test_the_process_ends_with_a_save(ended: dict[str, Ended]) -> None:
    """All ranks end at once: the checkpoint is complete, and nobody stays."""
    ended["all"].check(of_failing_rank=0)
    checkpoint.verify(ended["all"].folder / "c")


_PART = f"rank-{FAILING_RANK:05d}-of-{WORLD_SIZE:05d}.json, ..."


@pytest.mark.bookkeeping
@pytest.mark.parametrize(
    ("scenario", "status", "lost"),
    [
        ("dies", 3, "rank 0: {}: nothing was written"),
        ("stops", LATE, "rank 0: {}: nothing was written"),
        ("hangs", 0, f"rank {FAILING_RANK}: {{}}: this rank's thread"),
    ],
)
def test_the_process_ends_without_a_rank(
    scenario: str, status: int | str, lost: str, ended: dict[str, Ended]
) -> None:
    """One rank fails while it writes: the others end, and it is said what was lost.

    What was there before is still there.
    """
    told = ended[scenario]
    told.check(of_failing_rank=status)
    log = told.log
    abandoned = "the checkpoint was not saved\n  - abandoned at the end of the process"
    assert lost.format(abandoned) in log, log
    assert _PART in log
    assert "rank 1: the save to" in log
    assert "this rank's part is written; rank 0 finishes the save" in log
    checkpoint.verify(told.folder / "c")
    assert '"before"' in (told.folder / "c" / "manifest.json").read_text()
