"""Fresh processes for each measurement."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_TAIL_CHARS = 4000


class BenchError(RuntimeError):
    """A measurement failed; the message ends with the output of the rank."""


def end_rank() -> NoReturn:
    """End this process, which has reported, without destroying anything.

    A destructor may not return: that of torch's DDP holds the GIL while it waits for a
    thread of gloo, which may need the GIL.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_ranks(
    words: Sequence[str],
    num_ranks: int,
    *,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    prefix: Callable[[int], Sequence[str]] = lambda _: (),
) -> dict[str, Any]:
    """Run one implementation once; return what its first rank reports.

    Args:
        words: Command line after the interpreter. One more is added: a folder, in
            which rank 0 must leave ``result.json``.
        num_ranks: Processes to start, each with RANK and WORLD_SIZE set.
        timeout_s: How long they may take.
        environ: More environment variables of theirs.
        prefix: The words before a rank's command, which it must end up as.

    Raises:
        BenchError: A rank failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp_c-bench-") as text:
        folder = Path(text)
        command = [sys.executable, *words, text]
        env = {**os.environ, **(environ or {}), "WORLD_SIZE": str(num_ranks)}
        logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as output:
                    ranks.append(
                        subprocess.Popen(
                            [*prefix(rank), *command],
                            env={**env, "RANK": str(rank)},
                            stdout=output,
                            stderr=output,
                        )
                    )
            failed = _first_failed(ranks, timeout_s)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if failed is not None:
            code = ranks[failed].returncode
            tail = logs[failed].read_text(errors="replace")[-_TAIL_CHARS:]
            raise BenchError(
                f"rank {failed} of {' '.join(words)} failed, or ran longer than "
                f"{timeout_s:g} s (exit status {code}):\n{tail}"
            )
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result


def _first_failed(
    ranks: Sequence[subprocess.Popen[bytes]], timeout_s: float
) -> int | None:
    """Wait until all have ended well; return the first to fail or to be late."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return rank
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return codes.index(None)
        time.sleep(0.05)
