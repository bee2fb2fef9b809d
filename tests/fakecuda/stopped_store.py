"""Rank 0, which hosts the store, is stopped before the ranks wrap, or before they meet.

    python -m fakecuda.stopped_store <folder> wrapping|meeting

Prints what rank 1 says.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from helpers.impl import fsdp
from helpers.one_gpu import one_gpu_environment

TIMEOUT_S = 3
LIMIT_S = 60.0


def _store(rank: int, folder: Path) -> dist.Store:
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(folder / "port")
        return store
    while not (folder / "port").exists():
        time.sleep(0.01)
    port = int((folder / "port").read_text())
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def _rank(rank: int, folder: Path, place: str) -> None:
    os.environ.update(one_gpu_environment(rank))
    os.environ["TORCH_NCCL_COORD_CHECK_MILSEC"] = "100"
    torch.set_default_device("cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=_store(rank, folder),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=LIMIT_S),
    )
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    dist.barrier()
    if place == "wrapping":
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)  # a thread of torch's waits for the store's answer by then
    begin = time.monotonic()
    model = fsdp(nn.Linear(8, 8), process_group=group)
    if rank == 0:
        time.sleep(1)  # the other one waits for the verdict by then
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        model(torch.randn(2, 8)).sum().backward()
    except RuntimeError as error:
        print(f"{time.monotonic() - begin:.1f} s: {error}", flush=True)
    os._exit(0)


def main() -> None:
    folder, place = Path(sys.argv[1]), sys.argv[2]
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            if rank == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            _rank(rank, folder, place)
        pids.append(pid)
    deadline = time.monotonic() + LIMIT_S
    while os.waitpid(pids[1], os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if time.monotonic() >= deadline:
        print("rank 1 did not end")


if __name__ == "__main__":
    main()
