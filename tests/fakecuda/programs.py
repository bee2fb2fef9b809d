"""Programs of two ranks that share the device, each with an environment of its own.

    python -m fakecuda.programs <scenario>

Each prints what rank 0 found.
"""

import copy
import os
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import fsdp_c
from fakecuda.device import set_schedule
from helpers.one_gpu import one_gpu_environment

DIM = 8
WORLD_SIZE = 2
NUM_SEEDS = 12
DELAY = 20.0  # long enough that what misses a wait comes too early


def network() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))


def shard(model: nn.Sequential) -> nn.Sequential:
    for layer in model:
        fsdp_c.fully_shard(layer)
    return fsdp_c.fully_shard(model)


def whole_batch(step: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(step)
    return torch.randn(2 * WORLD_SIZE, DIM, generator=generator)


def largest_error(rank: int, num_steps: int, captures: bool = False) -> float:
    """Train beside the unsharded model; return the largest difference of weights."""
    worst = 0.0
    for seed in range(NUM_SEEDS):
        set_schedule(seed, DELAY)
        torch.manual_seed(seed)
        reference = network()
        model = shard(copy.deepcopy(reference))
        options = {"lr": 0.1, "capturable": True}
        optimizers = [
            torch.optim.Adam(m.parameters(), **options) for m in (model, reference)
        ]

        def train_step(x: torch.Tensor, model=model, optimizer=optimizers[0]) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step_of_model: Callable[..., object] = train_step
        if captures:
            step_of_model = fsdp_c.capture_step(
                train_step, model, optimizers[0], warmup=1
            )
        for step in range(num_steps):
            whole = whole_batch(step)
            step_of_model(whole[2 * rank :][:2])
            train_step(whole, reference, optimizers[1])
        for mine, theirs in zip(
            model.parameters(), reference.parameters(), strict=True
        ):
            error = (mine.full_tensor() - theirs).abs().max().item()
            worst = max(worst, error if error == error else float("inf"))
    return worst


def train(rank: int) -> str:
    return f"{largest_error(rank, 2):.1g} {torch.cuda.get_allocator_backend()}"


def capture(rank: int) -> str:
    return f"{largest_error(rank, 4, captures=True):.1g}"


SCENARIOS = {"train": train, "capture": capture}


def run_rank(rank: int, store: str, scenario: str) -> None:
    os.environ.update(one_gpu_environment(rank))
    torch.set_default_device("cuda")
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(store, WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
    )
    found = SCENARIOS[scenario](rank)
    if rank == 0:
        print(found, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Fork the ranks; fail if one does."""
    folder = tempfile.mkdtemp()
    pids = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            run_rank(rank, f"{folder}/store", sys.argv[1])
            sys.exit(0)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(max(map(os.waitstatus_to_exitcode, statuses), key=abs))


if __name__ == "__main__":
    main()
