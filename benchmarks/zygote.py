"""Ranks as forks of a process that has imported torch: most of a short run was imports.

A zygote runs one group of ranks after the other. It imports the script of a group,
never runs anything of it, and forks: so each rank is a fresh process. What is read when
a process starts (LD_PRELOAD, OMP_NUM_THREADS) is given to the zygote.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

_TAIL_CHARS = 4000
_POLL_S = 0.02
_STACKS_S = 2.0  # from the signal that asks a late rank for its stacks to its end
# Imported late by what the ranks call.
_PRELOADED = ("torch._dynamo",)


class Zygote:
    """A process that forks ranks, and what talks to it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Start the process; it ends with `close` or with this process."""
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, words: Sequence[str], num_ranks: int, *, timeout_s: float
    ) -> dict[str, Any]:
        """Run a script on some ranks; return what the first one leaves.

        Args:
            words: The script and its arguments. One more is added: a folder, in which
                rank 0 must leave ``result.json``.
            num_ranks: Processes to fork, each with RANK and WORLD_SIZE set.
            timeout_s: How long they may take.

        Raises:
            TimeoutError: A rank was late; the message ends with its output, and with
                the stacks of all its threads.
            RuntimeError: A rank failed; the message ends with its output.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="fsdp_c-bench-") as text:
            request = {
                "words": [*words, text],
                "num_ranks": num_ranks,
                "timeout_s": timeout_s,
                "folder": text,
            }
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
            if not reply:
                raise RuntimeError(f"the zygote ended with {self._process.wait()}")
            failed = json.loads(reply)
            if failed is not None:
                log = _log(Path(text), failed["rank"])
                error = TimeoutError if failed["is_late"] else RuntimeError
                raise error(
                    f"rank {failed['rank']} of {' '.join(words)} {failed['how']}:\n"
                    + log.read_text(errors="replace")[-_TAIL_CHARS:]
                )
            result: dict[str, Any] = json.loads(
                (Path(text) / "result.json").read_text()
            )
            return result

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def started(environ: Mapping[str, str], number: int) -> Iterator[SimpleQueue[Zygote]]:
    """Have some zygotes in this context; take one for a run and put it back."""
    zygotes = [Zygote(environ) for _ in range(number)]
    free: SimpleQueue[Zygote] = SimpleQueue()
    for zygote in zygotes:
        free.put(zygote)
    try:
        yield free
    finally:
        for zygote in zygotes:
            zygote.close()


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


# In the zygote ---------------------------------------------------------------------


def _serve() -> None:
    """Answer each request with null, or with the rank that failed and how."""
    for name in _PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        importlib.import_module(Path(request["words"][0]).stem)
        pids = [_fork(request, rank) for rank in range(request["num_ranks"])]
        failed = _wait(pids, request["timeout_s"])
        print(json.dumps(failed), flush=True)


def _fork(request: Mapping[str, Any], rank: int) -> int:
    """Return the pid of a rank."""
    pid = os.fork()
    if pid == 0:
        _be_rank(request, rank)
    return pid


def _be_rank(request: Mapping[str, Any], rank: int) -> NoReturn:
    """Run the script as if the interpreter had been started with it."""
    with (
        _log(Path(request["folder"]), rank).open("wb") as log,
        open(os.devnull) as null,
    ):
        os.dup2(null.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # to stderr: the log
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(request["num_ranks"]))
    sys.argv = request["words"]
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(pids: Sequence[int], timeout_s: float) -> dict[str, Any] | None:
    """Wait until all have ended well; else kill the rest and return who failed."""
    deadline = time.monotonic() + timeout_s
    parent = os.getppid()
    running = dict(enumerate(pids))
    failed: dict[str, Any] | None = None
    while running and failed is None:
        for rank, pid in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del running[rank]
            if status != 0 and failed is None:
                code = os.waitstatus_to_exitcode(status)
                failed = {"rank": rank, "how": f"ended with {code}", "is_late": False}
        if running and failed is None and time.monotonic() > deadline:
            how = f"took over {timeout_s:g} s"
            failed = {"rank": min(running), "how": how, "is_late": True}
            for pid in running.values():
                os.kill(pid, signal.SIGUSR1)
            time.sleep(_STACKS_S)
        if running and os.getppid() != parent:  # nobody waits any more
            failed = {"rank": min(running), "how": "was ended", "is_late": False}
        time.sleep(_POLL_S)
    for pid in running.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return failed


if __name__ == "__main__":
    _serve()
