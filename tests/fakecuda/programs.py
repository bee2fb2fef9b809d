"""Programs of two ranks that share the device, each with an environment of its own.

    python -m fakecuda.programs <scenario>

Each prints what rank 0 found.
"""

import copy
import gc
import json
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_c
from fakecuda.device import set_schedule
from helpers.one_gpu import one_gpu_environment

DIM = 8
WORLD_SIZE = 2
TIMEOUT_S = 12  # also for the meeting of the ranks, on a busy machine
NUM_SEEDS = 12
DELAY = 20.0  # long enough that what misses a wait comes too early


def network(dim: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(dim, dim) for _ in range(4)))


def shard(model: nn.Sequential) -> nn.Sequential:
    for layer in model:
        fsdp_c.fully_shard(layer)
    return fsdp_c.fully_shard(model)


def whole_batch(step: int, dim: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(step)
    return torch.randn(2 * WORLD_SIZE, dim, generator=generator)


def largest_error(
    rank: int,
    num_steps: int,
    *,
    dim: int = DIM,
    num_seeds: int = NUM_SEEDS,
    captures: bool = False,
    keeps: bool = False,
) -> float:
    """Train beside the unsharded model; return the largest difference of weights."""
    worst = 0.0
    for seed in range(num_seeds):
        set_schedule(seed, DELAY)
        torch.manual_seed(seed)
        reference = network(dim)
        model = shard(copy.deepcopy(reference))
        optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
            for each in (model, reference)
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
        if keeps:
            kept.append((step_of_model, model))
        for step in range(num_steps):
            whole = whole_batch(step, dim)
            step_of_model(whole[2 * rank :][:2])
            train_step(whole, reference, optimizers[1])
        for mine, theirs in zip(
            model.parameters(), reference.parameters(), strict=True
        ):
            error = (mine.full_tensor() - theirs).abs().max().item()
            worst = max(worst, math.inf if math.isnan(error) else error)
    return worst


def train(rank: int) -> str:
    return f"{largest_error(rank, 2):.1g} {torch.cuda.get_allocator_backend()}"


def capture(rank: int) -> str:
    """Capture a step whose blocks need several of a segment's handles, of 20 MiB."""
    return f"{largest_error(rank, 3, dim=2048, num_seeds=1, captures=True):.1g}"


kept: list[object] = []  # until the end of the process


def live_model(rank: int) -> str:
    """End with a model that nothing freed."""
    return f"{largest_error(rank, 1, num_seeds=1, keeps=True):.1g}"


def live_graph(rank: int) -> str:
    """End with a captured step that nothing freed."""
    return f"{largest_error(rank, 3, num_seeds=1, captures=True, keeps=True):.1g}"


def half_a_replay(rank: int) -> str:
    """Rank 1 stops replaying: rank 0's replay has the time limit of its group."""
    model = shard(network(DIM))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()

    step = fsdp_c.capture_step(train_step, model, optimizer, warmup=1)
    for _ in range(3):
        step(torch.randn(2, DIM))
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)
    try:
        for _ in range(2):
            step(torch.randn(2, DIM))
            torch.cuda.synchronize()
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)


def shapes_only(rank: int) -> str:
    """Make a step of a model that the machine could not hold."""
    model = nn.Sequential(*(nn.Linear(32768, 32768) for _ in range(5)))
    shard(model)
    # Any other reads its steps on the host, and divides by what none of them changed.
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.empty(2, 32768)).square().mean().backward()
    optimizer.step()
    used = torch.cuda.max_memory_allocated()
    touched = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{used >> 30} {touched >> 30}"


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, 4 * dim)
        self.outer = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


class Decoder(nn.Module):
    """What a language model's memory is made of."""

    def __init__(self, dim: int, num_blocks: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(num_blocks)))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def shard_decoder(model: Decoder, implementation: str) -> nn.Module:
    """Shard it by one of torch's classes or by one of ours."""
    package = fsdp_c if implementation.startswith("fsdp_c.") else torch_fsdp
    if implementation.endswith("fully_shard"):
        policy = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        mesh = init_device_mesh("cuda", (WORLD_SIZE,))
        for block in model.blocks:
            package.fully_shard(block, mesh=mesh, mp_policy=policy)
        return package.fully_shard(model, mesh=mesh, mp_policy=policy)
    return package.FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=0,
        use_orig_params=True,
        mixed_precision=torch_fsdp.MixedPrecision(torch.bfloat16, torch.float32),
    )


def memory_of(implementation: str) -> dict[str, int]:
    """Make steps; return bytes of the allocator in the last one."""
    gc.collect()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    model = shard_decoder(Decoder(1024, 8, 32768), implementation)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(2, 512, dtype=torch.long)
    device_allocs = []
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["num_device_alloc"]
        loss = model(tokens)
        end_of_forward = torch.cuda.memory_allocated()
        loss = loss.float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        device_allocs.append(torch.cuda.memory_stats()["num_device_alloc"] - before)
    return {
        "peak": torch.cuda.max_memory_allocated() - allocated,
        "end_of_forward": end_of_forward - allocated,
        "reserved": torch.cuda.memory_reserved() - reserved,
        "late_device_allocs": sum(device_allocs[2:]),
    }


def memory(rank: int) -> str:
    """Compare the memory of a step with torch's."""
    return json.dumps(
        {
            f"{package}.{name}": memory_of(f"{package}.{name}")
            for name in ("fully_shard", "FullyShardedDataParallel")
            for package in ("torch", "fsdp_c")
        }
    )


SCENARIOS = {
    "memory": memory,
    "shapes_only": shapes_only,
    "train": train,
    "capture": capture,
    "live_model": live_model,
    "live_graph": live_graph,
    "half_a_replay": half_a_replay,
}


def run_rank(rank: int, store: str, scenario: str) -> None:
    os.environ.update(one_gpu_environment(rank))
    torch.set_default_device("cuda")
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(store, WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=TIMEOUT_S if scenario == "half_a_replay" else 60),
    )
    found = SCENARIOS[scenario](rank)
    if rank == 0:
        print(found, flush=True)
    dist.barrier()
    if not scenario.startswith("live"):
        dist.destroy_process_group()


def main() -> None:
    folder = tempfile.mkdtemp()
    pids = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            run_rank(rank, f"{folder}/store", sys.argv[1])
            sys.exit(0)  # as a script ends
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(max(map(os.waitstatus_to_exitcode, statuses), key=abs))


if __name__ == "__main__":
    main()
