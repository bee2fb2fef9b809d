"""save: every rank writes its part, rank 0 publishes all of them at once.

Note [Saves and the end of the process]
The thread of a save is a daemon; a function that atexit calls decides how long the
process waits for it. A rank that is still writing its part finishes it, unless that
takes longer than the save's ``timeout`` and ``exit_timeout`` together, as on a
disk that does not answer. A rank that has written its part exits: rank 0 needs its
files, not its process. Rank 0 waits for the other parts as long as the folder grows. If
nothing in it changes for ``exit_timeout``, rank 0 takes the missing ranks for
dead, abandons the save, deletes its folder and logs an error. The checkpoint that was
at the path stays.
"""

import atexit
import contextlib
import logging
import os
import threading
import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fsdp_c import _native
from fsdp_c.checkpoint._collect import (
    Collected,
    collect,
    fingerprint,
    merge_states,
)
from fsdp_c.checkpoint._errors import CheckpointError, reason
from fsdp_c.checkpoint._files import (
    entry_file,
    rank_file,
    rename_durably,
    write_document,
    write_items,
)
from fsdp_c.checkpoint._folders import TemporaryFolder
from fsdp_c.checkpoint._manifest import MANIFEST, Manifest, parse_manifest
from fsdp_c.checkpoint._progress import progress as progress_bar
from fsdp_c.checkpoint._rank_entry import RankEntry
from fsdp_c.checkpoint._ranks import Ranks, raise_if_any

_log = logging.getLogger("fsdp_c")
_HEADLINE = "the checkpoint was not saved"
_FIRST_WAIT_S = 0.005
_LONGEST_WAIT_S = 0.25


def _failure(*problems: str) -> CheckpointError:
    return CheckpointError(_HEADLINE, problems)


class SaveHandle:
    """A save that may still be writing, in a thread.

    Attributes:
        path: Where the checkpoint is, or will be.
    """

    def __init__(self, job: "_Job") -> None:
        self.path = job.path
        self._job = job
        self._thread: threading.Thread | None = None
        self._problems: tuple[str, ...] = ()
        self._was_reported = False

    def done(self) -> bool:
        """Return whether it has ended, with or without success."""
        return self._thread is None or not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> str:
        """Wait for the end and return the path.

        Args:
            timeout: Seconds to wait; None: as long as it takes.

        Raises:
            CheckpointError: It failed. What was at the path before is still there.
            TimeoutError: It has not ended yet.
        """
        if not self._join(timeout):
            raise TimeoutError(f"the save to {self.path} has not ended yet")
        if self._problems:
            self._was_reported = True
            raise _failure(*self._problems)
        return self.path

    def _join(self, timeout: float | None = None) -> bool:
        """Wait for the end; return whether it has come."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self.done()

    def _take_unreported(self) -> list[str]:
        """Wait; return the problems that result() has not raised."""
        self._join()
        if not self._problems or self._was_reported:
            return []
        self._was_reported = True
        return [
            f"the save to {self.path} before this one failed: {problem}"
            for problem in self._problems
        ]

    def _run(self) -> None:
        try:
            self._job.run_in_thread()
        except CheckpointError as error:
            self._problems = error.problems or (str(error),)
        except BaseException as error:
            self._problems = (reason(error),)
        if self._problems:
            _log.error("%s", _failure(*self._problems))


_last: SaveHandle | None = None


def _finish_at_exit() -> None:
    """See Note [Saves and the end of the process]."""
    handle = _last
    if handle is None or handle.done():
        return
    _log.info("the process is ending: waiting for the save to %s", handle.path)
    handle._job.ending.set()
    # The thread has limits of its own first, and logs an error then.
    limit_s = handle._job.timeout_s + handle._job.exit_timeout_s
    if not handle._join(limit_s):
        problem = (
            "abandoned at the end of the process: this rank's thread had not ended "
            f"after {limit_s:g} s (the save's timeout and exit_timeout)"
        )
        _log.error("%s", _failure(problem))
    elif not handle._problems:
        _log.info("the save to %s: %s", handle.path, handle._job.outcome)


def wait_for_save() -> None:
    """Wait until this process writes no checkpoint; errors are kept for the caller."""
    if _last is not None:
        _last._join()


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optim: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    extra: Any = None,
    rank_extra: Any = None,
    random_states: bool = True,
    process_group: ProcessGroup | None = None,
    overwrite: bool = True,
    blocking: bool = True,
    timeout: float = 1800.0,
    exit_timeout: float = 60.0,
    progress: bool | None = None,
) -> SaveHandle:
    """Save a model, and what training needs besides, as a folder at ``path``.

    All ranks must call it, between steps, with a path on a file system that all of
    them share. The folder appears complete or not at all; a checkpoint that was at
    ``path`` stays until then. See docs/guide/checkpoint.md for the format.

    Args:
        path: The folder. What it holds must be a checkpoint, or nothing.
        model: The wrapped model.
        optim: Its optimizer.
        scheduler: Anything with ``state_dict()``; rank 0's is saved.
        extra: Plain values and tensors, such as the position in the data: None, bool,
            int, float, str, bytes, list, tuple, dict. Rank 0's is saved, for all.
        rank_extra: The same, for each rank its own.
        random_states: Save those of torch, Python and numpy, for each rank its own.
        process_group: The ranks that hold the model; the default group if None.
        overwrite: Replace a checkpoint that is at ``path``.
        blocking: False: copy everything to the host and write in a thread. A save
            that follows waits for this one; the end of the process finishes or
            abandons it, see docs/guide/checkpoint.md.
        timeout: Seconds that the thread of a save waits for the other ranks. A process
            that ends waits so long for the thread, and ``exit_timeout`` more.
        exit_timeout: Seconds that rank 0, at its end, waits for the other ranks while
            the folder does not grow.
        progress: Show a bar on rank 0; None: if stderr is a terminal.

    Returns:
        A handle; ``result()`` waits, and raises what went wrong in the thread. If it
        is not called, the next save raises it.

    Raises:
        CheckpointError: Nothing was saved; on all ranks, with the reasons of all.
    """
    global _last  # noqa: PLW0603  # one save at a time
    ranks = Ranks(process_group)
    problems = [] if _last is None else _last._take_unreported()
    _last = None
    collected = Collected()
    if not problems:
        try:
            collected = collect(
                model,
                optim,
                ranks,
                scheduler=scheduler,
                extra=extra,
                rank_extra=rank_extra,
                with_random_states=random_states,
            )
            if not blocking:
                collected.to_host()
        except Exception as error:
            problems.append(reason(error))
    job = _begin(os.fspath(path), collected, problems, ranks, overwrite, progress)
    job.timeout_s = timeout
    job.exit_timeout_s = exit_timeout
    handle = SaveHandle(job)
    if blocking:
        job.run_with(ranks)
    else:
        handle._thread = threading.Thread(
            target=handle._run, name=f"fsdp_c save {job.path}", daemon=True
        )
        _last = handle
        atexit.unregister(_finish_at_exit)  # once, and before what came earlier
        atexit.register(_finish_at_exit)
        handle._thread.start()
    return handle


def _begin(
    path: str,
    collected: Collected,
    problems: list[str],
    ranks: Ranks,
    overwrite: bool,
    progress: bool | None,
) -> "_Job":
    """Agree on the layout and the temporary folder.

    Raises:
        CheckpointError: Any rank has a problem.
    """
    reports = ranks.gather((problems, fingerprint(collected.units), collected.states))
    problems_of_rank: list[list[str]] = []
    temporary = manifest = None
    if reports is not None:
        problems_of_rank = [report[0] for report in reports]
        if not any(problems_of_rank):
            try:
                manifest = _merge(collected, reports)
                temporary = TemporaryFolder(path, overwrite=overwrite)
            except Exception as error:
                problems_of_rank = [[reason(error)]]
    names = ("", "", "")
    if temporary is not None:
        names = (temporary.folder, temporary.save_id, temporary.path)
    try:
        problems_of_rank, names = ranks.broadcast((problems_of_rank, names))
    except BaseException:
        if temporary is not None:
            temporary.discard()
        raise
    raise_if_any(_HEADLINE, problems_of_rank)
    return _Job(collected, manifest, temporary, names, ranks, progress)


def _merge(collected: Collected, reports: list[Any]) -> Manifest:
    manifest = collected.manifest
    assert manifest is not None
    for rank, (_, units, _) in enumerate(reports):
        if units != reports[0][1]:
            raise CheckpointError(
                f"rank {rank} holds other units than rank 0: all ranks of "
                "process_group must hold the same wrapped model"
            )
    names = [spec.name for spec in manifest.tensors()]
    states, problems = merge_states(names, [report[2] for report in reports])
    if problems:
        raise CheckpointError("the optimizer states differ", problems)
    if manifest.optim is None:
        return manifest
    return replace(manifest, optim=replace(manifest.optim, states=states))


class _Growth:
    """Watches whether files in a folder appear or grow."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._seen: dict[str, int] = {}
        self._since = time.monotonic()

    def idle_seconds(self) -> float:
        """Look; return the seconds since the last change."""
        seen = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                    seen[entry.name] = entry.stat().st_size
        if seen != self._seen:
            self._seen = seen
            self._since = time.monotonic()
        return time.monotonic() - self._since


class _Job:
    """The part of a save that writes files."""

    def __init__(
        self,
        collected: Collected,
        manifest: Manifest | None,
        temporary: TemporaryFolder | None,
        names: tuple[str, str, str],
        ranks: Ranks,
        progress: bool | None,
    ) -> None:
        self.folder, self.save_id, self.path = names
        self.timeout_s = 0.0
        self.exit_timeout_s = 0.0
        self.outcome = "complete"
        self.ending = threading.Event()  # set when the process ends
        self._collected = collected
        self._manifest = manifest
        self._temporary = temporary  # on rank 0
        self._rank = ranks.rank
        self._world_size = ranks.world_size
        self._progress = progress

    # With collectives -------------------------------------------------------

    def run_with(self, ranks: Ranks) -> None:
        """Write and publish; every rank learns how it ended.

        Raises:
            CheckpointError: Any rank failed.
        """
        try:
            problems: list[str] = []
            try:
                self._write()
            except Exception as error:
                problems.append(reason(error))
            reports = ranks.gather(problems)
            if reports is not None and not any(reports):
                try:
                    self._publish()
                except Exception as error:
                    reports = [[reason(error)]]
            if reports is not None and any(reports):
                self._discard()  # before the other ranks go on
            raise_if_any(_HEADLINE, ranks.broadcast(reports))
        finally:
            self._discard()

    # Without ----------------------------------------------------------------

    def run_in_thread(self) -> None:
        """Write and publish without collectives: ranks report by files.

        Raises:
            CheckpointError: Any rank failed, or took too long.
        """
        deadline = time.monotonic() + self.timeout_s
        try:
            self._write()
        except Exception as error:
            if self._temporary is None:
                self._report_failure(reason(error))
            else:
                self._discard()
            raise
        if self._temporary is None:
            self._wait_for_publication(deadline)
            return
        try:
            self._wait_for_entries(deadline)
            self._publish()
        finally:
            self._discard()

    def _name(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _report_failure(self, text: str) -> None:
        name = self._name(entry_file(self._rank, self._world_size))
        base = name.removesuffix(".json")
        try:
            with (
                open(f"{base}.failed.new", "wb", buffering=0) as file,
                contextlib.suppress(OSError),  # the disk may be full
            ):
                file.write(text.encode())
            os.rename(f"{base}.failed.new", f"{base}.failed")
        except FileNotFoundError:
            pass  # rank 0 has given up, and deleted the folder
        except OSError:
            _log.exception("cannot report to rank 0 that the save failed")

    def _pause(self, wait_s: float) -> float:
        """Wait for ``wait_s``, less if the process ends; return the next time."""
        if self.ending.is_set():
            time.sleep(wait_s)
        elif self.ending.wait(wait_s):
            return _FIRST_WAIT_S
        return min(2 * wait_s, _LONGEST_WAIT_S)

    def _wait_for_entries(self, deadline: float) -> None:
        wanted = {entry_file(r, self._world_size) for r in range(self._world_size)}
        growth = _Growth(self.folder)
        wait_s = _FIRST_WAIT_S
        while True:
            names = set(os.listdir(self.folder))
            failed = sorted(name for name in names if name.endswith(".failed"))
            if failed:
                texts = []
                for name in failed:
                    with open(self._name(name), encoding="utf-8") as file:
                        texts.append(f"{file.read() or 'a rank failed'} ({name})")
                raise _failure(*texts)
            missing = wanted - names
            if not missing:
                return
            if time.monotonic() > deadline:
                raise _failure(
                    f"{len(missing)} ranks did not write their part within "
                    f"{self.timeout_s:g} s (missing: {min(missing)}, ...): pass a "
                    "larger timeout, or see what those ranks wait for"
                )
            if self.ending.is_set() and growth.idle_seconds() > self.exit_timeout_s:
                raise _failure(
                    "abandoned at the end of the process: nothing was written for "
                    f"{self.exit_timeout_s:g} s (exit_timeout), and {len(missing)} "
                    f"ranks had not written their part (missing: {min(missing)}, ...)"
                )
            wait_s = self._pause(wait_s)

    def _wait_for_publication(self, deadline: float) -> None:
        wait_s = _FIRST_WAIT_S
        while not self._is_published():
            if self.ending.is_set():
                self.outcome = "this rank's part is written; rank 0 finishes the save"
                return
            if not os.path.isdir(self.folder) and not self._is_published():
                raise _failure("another rank failed: rank 0's error says why")
            if time.monotonic() > deadline:
                raise _failure(f"rank 0 did not finish within {self.timeout_s:g} s")
            wait_s = self._pause(wait_s)

    def _is_published(self) -> bool:
        try:
            with open(os.path.join(self.path, MANIFEST), "rb") as file:
                return parse_manifest(file.read()).save_id == self.save_id
        except (OSError, ValueError):
            return False

    # Both -------------------------------------------------------------------

    def _write(self) -> None:
        """Write this rank's file and, when it is durable, its entry."""
        collected, self._collected = self._collected, Collected()  # nobody keeps it
        rank, world_size = self._rank, self._world_size
        total = sum(i.tensor.numel() * i.tensor.element_size() for i in collected.items)
        is_on = False if rank != 0 else self._progress
        with progress_bar(f"saving {self.path}", total, is_on) as advance:
            written = write_items(
                self._name(rank_file(rank, world_size)),
                collected.items,
                save_id=self.save_id,
                advance=advance,
            )
        entry = RankEntry(
            save_id=self.save_id,
            rank=rank,
            **written._asdict(),
            plain=collected.plain,
            special=collected.special,
            random_states=collected.random_states,
            rank_extra=collected.rank_extra,
        )
        name = self._name(entry_file(rank, world_size))
        write_document(f"{name}.new", entry.dump())
        rename_durably(f"{name}.new", name)  # rank 0 may publish at once

    def _publish(self) -> None:
        """Write the manifest and put the folder in its place. On rank 0."""
        assert self._manifest is not None
        assert self._temporary is not None
        nbytes = 0
        for rank in range(self._world_size):
            for name in (
                rank_file(rank, self._world_size),
                entry_file(rank, self._world_size),
            ):
                try:
                    status = os.stat(self._name(name))
                except FileNotFoundError:
                    raise CheckpointError(
                        f"rank 0 does not see {name}, which rank {rank} wrote: save "
                        "to a file system that all ranks share"
                    ) from None
                nbytes += status.st_size
        manifest = replace(
            self._manifest,
            save_id=self.save_id,
            nbytes=nbytes,
            versions={
                "fsdp_c": _native.build_info()["version"],
                "torch": torch.__version__,
            },
        )
        write_document(self._name(MANIFEST), manifest.dump())
        self._temporary.publish()

    def _discard(self) -> None:
        if self._temporary is not None:
            self._temporary.discard()
