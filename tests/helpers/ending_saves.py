"""Ranks that start a save in a thread and end at once.

    python -m helpers.ending_saves <folder> <scenario>...

The ranks are forked from this process, which has imported torch but has neither
threads nor process groups; each ends as a script does, through Python's own end.
Scenarios: ``all`` ranks end; in ``dies`` one ends inside its first write, without a
word; in ``stops`` it is stopped there; in ``hangs`` its disk does not answer. They run
at the same time, on loaded cores. Prints by scenario, for each rank, the exit status
and the seconds from the end of its script to that of its process. A rank that has to be
killed has the status `LATE`.
"""

import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

WORLD_SIZE = 4
FAILING_RANK = 2
LIMIT_S = 60.0
LATE = "late"
SCENARIOS = ("all", "dies", "stops", "hangs")
# Of a rank that nothing comes from, and of a save: not too short for loaded cores.
EXIT_S = 3.0
HUNG_TIMEOUT_S = 3.0


def _die(*_: Any) -> int:
    os._exit(3)


def _stop(*_: Any) -> int:
    os.kill(os.getpid(), signal.SIGSTOP)
    return 0


def _hang(*_: Any) -> int:
    threading.Event().wait()
    return 0


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
    if scenario != "all":
        checkpoint.save(folder / "c", model, extra="before")
        dist.barrier()
        if rank == FAILING_RANK:
            fails = {"dies": _die, "stops": _stop, "hangs": _hang}[scenario]
            _files.os.writev = fails  # type: ignore[assignment]
    checkpoint.save(
        folder / "c",
        model,
        extra="last",
        blocking=False,
        timeout=HUNG_TIMEOUT_S if scenario == "hangs" else 1800.0,
        exit_timeout=60.0 if scenario == "all" else EXIT_S,
    )
    _moment(folder, rank).write_text(str(time.monotonic()))


def _moment(folder: Path, rank: int) -> Path:
    """Return the file that says when the script of a rank was at its end."""
    return folder.with_name(f"{folder.name}.{rank}")


def _fork(rank: int, folder: Path, scenario: str) -> int:
    pid = os.fork()
    if pid == 0:
        stderr = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(stderr, 1)
        os.dup2(stderr, 2)
        _rank(rank, folder, scenario)
        sys.exit(0)
    return pid


# A scenario and a rank.
Place = tuple[str, int]


def _wait(pids: dict[Place, int], folder: Path) -> dict[Place, tuple[int | str, float]]:
    """Return the status of each rank, and the seconds that its end took.

    Those are -1 where the script did not come to its end.
    """
    deadline = time.monotonic() + LIMIT_S
    stopped = ("stops", FAILING_RANK)
    ends: dict[Place, tuple[int | str, float]] = {}
    while left := pids.keys() - ends.keys():
        is_over = time.monotonic() >= deadline or left == {stopped}
        for place in left:
            ended, status = os.waitpid(pids[place], os.WNOHANG)
            if ended:
                moment = _moment(folder / place[0], place[1])
                seconds = -1.0
                if moment.exists():
                    seconds = time.monotonic() - float(moment.read_text())
                ends[place] = os.waitstatus_to_exitcode(status), seconds
            elif is_over:
                os.kill(pids[place], signal.SIGKILL)
                os.waitpid(pids[place], 0)
                ends[place] = LATE, -1.0
        time.sleep(0.01)
    return ends


def main() -> None:
    import torch
    import torch.distributed

    import fsdp_c.checkpoint  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # the ranks need not look at all that
    folder, scenarios = Path(sys.argv[1]), sys.argv[2:]
    pids = {}
    for scenario in scenarios:
        (folder / scenario).mkdir()
        for rank in range(WORLD_SIZE):
            pids[scenario, rank] = _fork(rank, folder / scenario, scenario)
    ends = _wait(pids, folder)
    of = {name: [ends[name, rank] for rank in range(WORLD_SIZE)] for name in scenarios}
    print(json.dumps(of))


if __name__ == "__main__":
    main()
