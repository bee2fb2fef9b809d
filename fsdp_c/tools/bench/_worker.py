"""One rank of one implementation: trains, measures, reports.

    RANK=0 python -m fsdp_c.tools.bench._worker IMPLEMENTATION WORKLOAD FOLDER

Rank 0 writes ``result.json`` into the folder, in which the ranks also meet.
"""

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_c.tools.bench._implementations import DDP, parallelise
from fsdp_c.tools.bench._processes import end_rank
from fsdp_c.tools.bench._workload import Workload

# Implementations that train alike have alike losses in the first steps; later ones
# are chaotic in low precision.
NUM_LOSSES = 4
MIN_GROUPS = 5
MAX_GROUPS = 100_000
# Steps of which the time is taken together: a GPU's host runs ahead of it.
GROUP_SIZE = {"cuda": 10, "cpu": 1}


class Trainer:
    """A model, its optimizer and this rank's batch."""

    def __init__(
        self, name: str, workload: Workload, *, offloads: bool = False
    ) -> None:
        self.workload = workload
        self.on_gpu = workload.device == "cuda"
        dtype = workload.compute_dtype
        self.uses_autocast = name == DDP and dtype is not None
        device = torch.device("cpu")
        if self.on_gpu:
            device = torch.device("cuda", torch.cuda.current_device())
        self.model = parallelise(
            workload.model(),
            name,
            device,
            param_dtype=dtype,
            reduce_dtype=dtype,
            offloads=offloads,
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, foreach=True
        )
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        shape = (workload.batch, workload.length + 1)
        tokens = torch.randint(workload.vocabulary, shape, generator=generator)
        tokens = tokens.to(device)
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]

    def step(self) -> Tensor:
        """Train one step; return the loss."""
        with torch.autocast(
            self.workload.device, self.workload.compute_dtype, self.uses_autocast
        ):
            loss: Tensor = self.model(self.inputs, self.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def wait(self) -> None:
        """Wait until the GPU has done all of it."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def first_losses(self, num_losses: int = NUM_LOSSES) -> list[float]:
        """Train; return the mean over the ranks of each loss."""
        losses = []
        for _ in range(num_losses):
            mean = self.step().float()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
        return losses

    def times(
        self, num_groups: int, group_size: int | None = None
    ) -> tuple[list[float], list[float]]:
        """Return the time of a step and the host's part of it, in ms, of each group."""
        size = group_size or GROUP_SIZE[self.workload.device]
        steps, hosts = [], []
        self.wait()
        for _ in range(num_groups):
            begin = time.perf_counter_ns()
            for _ in range(size):
                self.step()
            hosts.append((time.perf_counter_ns() - begin) / 1e6 / size)
            self.wait()
            steps.append((time.perf_counter_ns() - begin) / 1e6 / size)
        return steps, hosts


def _num_groups(trainer: Trainer, seconds: float) -> int:
    """Return how many groups take so long; the same on all ranks."""
    steps, _ = trainer.times(MIN_GROUPS)
    size = GROUP_SIZE[trainer.workload.device]
    count = int(seconds * 1e3 / (statistics.median(steps) * size))
    wanted = torch.tensor(min(max(count, MIN_GROUPS), MAX_GROUPS))
    wanted = wanted.to("cuda" if trainer.on_gpu else "cpu")
    dist.broadcast(wanted, 0)
    return int(wanted.item())


def _process_nbytes() -> int:
    """Return the most memory that this process had so far, libraries included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, workload: Workload) -> dict[str, Any]:
    """Train for some seconds; return what this rank saw."""
    without_model = _process_nbytes()
    trainer = Trainer(name, workload)
    losses = trainer.first_losses()
    count = _num_groups(trainer, workload.seconds)
    if trainer.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    steps, hosts = trainer.times(count)
    if trainer.on_gpu:
        peak_nbytes = torch.cuda.max_memory_allocated()
    else:
        peak_nbytes = _process_nbytes() - without_model
    return {
        "losses": losses,
        "num_steps": count * GROUP_SIZE[workload.device],
        "step_ms": statistics.median(steps),
        "host_ms": statistics.median(hosts),
        "peak_nbytes": peak_nbytes,
    }


def main(words: list[str]) -> NoReturn:
    """Run one rank, and end its process."""
    name, text, folder = words
    workload = Workload(**json.loads(text))
    torch.set_num_threads(max(1, torch.get_num_threads() // workload.num_ranks))
    rank = int(os.environ["RANK"])
    backend = "gloo"
    if workload.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(
        backend,
        (Path(folder) / "store").as_uri(),
        rank=rank,
        world_size=workload.num_ranks,
    )
    result = measure(name, workload)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    end_rank()


if __name__ == "__main__":
    main(sys.argv[1:])
