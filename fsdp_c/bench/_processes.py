"""Fresh processes for each measurement."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_c.bench._workload import Workload

# Beyond the time to train: imports, communicators, first steps.
START_TIMEOUT_S = 300.0
_TAIL_CHARS = 3000


class BenchError(RuntimeError):
    """A measurement failed; the message ends with the output of the rank."""


def run(
    name: str, workload: Workload, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run one implementation once; return what its first rank reports.

    Args:
        name: Of ``IMPLEMENTATIONS``.
        workload: What to train.
        environ: More environment variables of the ranks.

    Raises:
        BenchError: A rank failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp_c-bench-") as text:
        folder = Path(text)
        env = {**os.environ, **(environ or {})}
        words = (name, workload.to_json(), text)
        command = [sys.executable, "-m", "fsdp_c.bench._worker", *words]
        logs = [folder / f"rank{rank}.log" for rank in range(workload.num_ranks)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as output:
                    ranks.append(
                        subprocess.Popen(
                            [*command, str(rank)], env=env, stdout=output, stderr=output
                        )
                    )
            failed = _first_failed(ranks, START_TIMEOUT_S + 10 * workload.seconds)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if failed is not None:
            code = ranks[failed].returncode
            tail = logs[failed].read_text(errors="replace")[-_TAIL_CHARS:]
            raise BenchError(f"{name}: rank {failed} ended with {code}:\n{tail}")
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
