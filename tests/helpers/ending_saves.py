"""Ranks that start a save in a thread and end at once.

    python -m helpers.ending_saves <folder> <scenario>...

The ranks are forked from this process, which has imported torch but has neither
threads nor process groups; each ends as a script does, through Python's own end.
Scenarios: ``all`` ranks end; in ``dies`` one ends inside its first write, without
a word. Prints the exit status of each rank by scenario, `LATE` for one that had to be
killed.
"""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

WORLD_SIZE = 3
DYING_RANK = 2
LIMIT_S = 60.0
LATE = "late"
SCENARIOS = ("all", "dies")


def _die(*_: Any) -> int:
    os._exit(3)


def _rank(rank: int, folder: Path, scenario: str) -> None:
    import torch.distributed as dist
    from torch import nn

    from fsdp_c import FSDP, checkpoint
    from fsdp_c.checkpoint import _files

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.basicConfig(level=logging.INFO, format=f"rank {rank}: %(message)s")
    store = dist.FileStore(str(folder / "store"), WORLD_SIZE)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    model = FSDP(nn.Linear(256, 256), use_orig_params=True)
    if scenario == "dies":
        checkpoint.save(folder / "c", model, extra="before")
        dist.barrier()
        if rank == DYING_RANK:
            _files.os.writev = _die  # type: ignore[assignment]
    checkpoint.save(folder / "c", model, extra="last", blocking=False)


def _fork(rank: int, folder: Path, scenario: str) -> int:
    pid = os.fork()
    if pid == 0:
        stderr = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(stderr, 1)
        os.dup2(stderr, 2)
        _rank(rank, folder, scenario)
        sys.exit(0)
    return pid


def _wait(pid: int, deadline: float) -> int | str:
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            break
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return LATE


def main() -> None:
    """Run the scenarios."""
    import torch
    import torch.distributed

    import fsdp_c.checkpoint  # noqa: F401

    torch.set_num_threads(1)
    statuses = {}
    for scenario in sys.argv[2:]:
        folder = Path(sys.argv[1]) / scenario
        folder.mkdir()
        pids = [_fork(rank, folder, scenario) for rank in range(WORLD_SIZE)]
        deadline = time.monotonic() + LIMIT_S
        statuses[scenario] = [_wait(pid, deadline) for pid in pids]
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
