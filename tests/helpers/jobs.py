"""Runs tests in several processes: `pytest --jobs 3`.

Note [Jobs are forked]
Importing torch and collecting the tests takes ten seconds, so one process does both,
starts the fork server of `helpers.distributed`, and forks the jobs. A job runs one test
after the other, with ranks of its own, and sends its reports to the first process,
which hands out the tests. Tests of a file stay in one job, where what they share is
made once, until no file is left that nobody has begun.
"""

import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest


class _Queue:
    """The tests that no job has yet, by file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._left: dict[Path, deque[int]] = {}
        for index, path in enumerate(paths):
            self._left.setdefault(path, deque()).append(index)
        self._begun: set[Path] = set()
        self._paths = paths

    def take(self, before: int | None) -> int | None:
        """Return the test that follows ``before``, or one of another file."""
        if not self._left:
            return None
        path = None if before is None else self._paths[before]
        if path not in self._left:
            fresh = (each for each in self._left if each not in self._begun)
            longest = max(self._left, key=lambda each: len(self._left[each]))
            path = next(fresh, longest)
        self._begun.add(path)
        index = self._left[path].popleft()
        if not self._left[path]:
            del self._left[path]
        return index

    def put_back(self, indices: Sequence[int]) -> None:
        """Let other jobs run these tests."""
        for index in reversed(indices):
            self._left.setdefault(self._paths[index], deque()).appendleft(index)

    def clear(self) -> None:
        """Hand out no more tests."""
        self._left.clear()


class _Job:
    """A process that runs tests, as the first process sees it."""

    def __init__(self, number: int, session: pytest.Session, others: Any) -> None:
        """Fork; ``others`` are connections that are not this job's."""
        self.name = f"job{number}"
        self.last: int | None = None
        self.taken: deque[int] = deque()
        self.connection, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for connection in (self.connection, *others):
                connection.close()
            _run(session, self.name, theirs)
        theirs.close()

    def hand_out(self, queue: _Queue) -> None:
        """Send the next test, or that there is none."""
        index = queue.take(self.last)
        if index is not None:
            self.last = index
            self.taken.append(index)
        self.connection.send(index)

    def end(self) -> int:
        """Wait for the process to end; return its exit status."""
        self.connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class _Sender:
    """The plugin of a job that sends reports and warnings."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.connection: Connection | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_plain = self._config.hook.pytest_report_to_serializable
        assert self.connection is not None
        self.connection.send(("report", to_plain(config=self._config, report=report)))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: Any,
    ) -> None:
        if self.connection is None:  # a warning of before the fork, once more
            return
        # The first process may not have the class of the message, nor its category.
        kinds = warning_message.category.__mro__
        plain = warnings.WarningMessage(
            str(warning_message.message),
            next(kind for kind in kinds if kind.__module__ == "builtins"),
            warning_message.filename,
            warning_message.lineno,
        )
        content = {"when": when, "nodeid": nodeid, "location": location}
        self.connection.send(("warning", {"warning_message": plain, **content}))


def _set_up(session: pytest.Session, name: str, connection: Connection) -> None:
    """Share nothing with the process that this one is forked from."""
    config = session.config
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    sender = _Sender(config)
    plugins.register(sender)
    sender.connection = connection
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are the first process's
    capture.start_global_capturing()
    capture.suspend_global_capture()
    temporary = config._tmp_path_factory  # type: ignore[attr-defined]
    temporary._basetemp = temporary.getbasetemp() / name
    temporary._basetemp.mkdir(mode=0o700)
    # It would wait for the server, which is a child of the first process.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]


def _run(session: pytest.Session, name: str, connection: Connection) -> None:
    """Run tests, as the job ``name``, until there are no more. Does not return."""
    status = 1
    try:
        _set_up(session, name, connection)
        # The next test says which fixtures stay.
        ahead: deque[int | None] = deque()
        while True:
            while len(ahead) < 2 and None not in ahead:
                connection.send(("next", None))
                ahead.append(connection.recv())
            index = ahead.popleft()
            if index is None:
                break
            following = session.items[ahead[0]] if ahead[0] is not None else None
            item = session.items[index]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        status = 0
    except (EOFError, BrokenPipeError):
        pass  # the first process has ended
    except BaseException:
        capture: Any = session.config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _Loop:
    """What the first process does: it hands out tests and collects reports."""

    def __init__(self, session: pytest.Session, num_jobs: int) -> None:
        self._session = session
        self._queue = _Queue([item.path for item in session.items])
        self._jobs: dict[Any, _Job] = {}
        self._num_started = 0
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        for _ in range(num_jobs):
            self._start()

    def _start(self) -> None:
        job = _Job(self._num_started, self._session, list(self._jobs))
        self._num_started += 1
        self._jobs[job.connection] = job

    def run(self) -> None:
        """Return when all tests have run; raise what ends the session early."""
        session = self._session
        try:
            while self._jobs:
                for connection in wait(list(self._jobs)):
                    self._receive(self._jobs[connection])
                if session.shouldfail or session.shouldstop:
                    self._queue.clear()
        finally:
            for job in self._jobs.values():
                os.kill(job.pid, signal.SIGKILL)
                job.end()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _receive(self, job: _Job) -> None:
        hook = self._session.config.hook
        try:
            kind, content = job.connection.recv()
        except (EOFError, ConnectionResetError):
            del self._jobs[job.connection]
            status = job.end()
            if status != 0 or job.taken:
                self._replace(job, status)
            return
        if kind == "next":
            job.hand_out(self._queue)
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=content)
        else:
            report = hook.pytest_report_from_serializable(
                config=self._session.config, data=content
            )
            hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                job.taken.popleft()
                hook.pytest_runtest_logfinish(
                    nodeid=report.nodeid, location=report.location
                )

    def _replace(self, job: _Job, status: int) -> None:
        """Report the test that ended its job, and let another one go on."""
        how = f"{job.name} ended with status {status}"
        if not job.taken:
            raise RuntimeError(f"{how}, in no test")
        item = self._session.items[job.taken.popleft()]
        report = pytest.TestReport(
            item.nodeid, item.location, {}, "failed", how, "call"
        )
        self._session.config.hook.pytest_runtest_logreport(report=report)
        self._queue.put_back(job.taken)
        self._start()


class Jobs:
    """The plugin that replaces pytest's loop over the tests."""

    def __init__(self, num_jobs: int) -> None:
        self._num_jobs = num_jobs

    def pytest_sessionstart(self) -> None:
        """Let the fork server import torch while this process does."""
        from helpers.distributed import fork_server

        fork_server()

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the tests in the jobs."""
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own reports it
        _Loop(session, self._num_jobs).run()
        return True
