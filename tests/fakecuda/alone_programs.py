"""Steps of small models in each API, and what they hold and call, as JSON.

    python -m fakecuda.alone_programs <ranks> <width>

With ``FAKE_CUDA_NOOP=alone`` as rank 0 of ranks that do not exist; else with all.
"""

import gc
import json
import os
import resource
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_c
from fakecuda.alone import is_alone, join_alone
from fakecuda.device import count, num_collectives, set_behind
from helpers.one_gpu import one_gpu_environment

NUM_LAYERS, BATCH = 4, 64
NUM_WARMUP = 2
APIS = {
    "FSDP1": fsdp.FullyShardedDataParallel,
    "FSDP2": fsdp.fully_shard,
    "FullyShardedDataParallel": fsdp_c.FullyShardedDataParallel,
    "fully_shard": fsdp_c.fully_shard,
}
COUNTED = ("event_records", "event_waits", "synchronizations", "mallocs", "launches")


def model_of(api: str, world_size: int, dim: int) -> nn.Module:
    """Return a model on the device that was made on meta; each layer is a unit."""
    with torch.device("meta"):
        layers = [nn.Linear(dim, dim, bias=False) for _ in range(NUM_LAYERS)]
        model = nn.Sequential(*layers)
    shard: Any = APIS[api]
    if isinstance(shard, type):
        wrapped: nn.Module = shard(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=True,
            device_id=0,
            param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
        )
        return wrapped
    mesh = init_device_mesh("cuda", (world_size,))
    for layer in model:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    return model.to_empty(device="cuda")


def figures(api: str, world_size: int, dim: int) -> dict[str, int]:
    """Return what one step of rank 0 holds and calls, in bytes and calls."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = model_of(api, world_size, dim)
    x = torch.empty(BATCH, dim, device="cuda")
    shards = torch.cuda.memory_allocated() - x.nbytes - before
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(NUM_WARMUP + 1):
        if step == NUM_WARMUP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            counts = {name: count(name) for name in COUNTED}
            collectives = num_collectives()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        **{name: count(name) - so_far for name, so_far in counts.items()},
        "collectives": num_collectives() - collectives,
        "peak": torch.cuda.max_memory_allocated() - before,
        "active": torch.cuda.memory_stats()["active_bytes.all.peak"] - before,
        "shards": shards,
    }


def run(world_size: int, dim: int) -> None:
    found = {api: figures(api, world_size, dim) for api in APIS}
    behind = {}
    if is_alone():
        set_behind(True)
        behind = {api: figures(api, world_size, dim) for api in APIS}
        set_behind(False)
    if dist.get_rank() == 0:
        touched = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said = {"apis": found, "behind": behind, "touched": touched}
        print(json.dumps(said), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    world_size, dim = map(int, sys.argv[1:])
    if is_alone():
        join_alone(world_size)
        run(world_size, dim)
        return
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                os.environ.update(one_gpu_environment(rank))
                store = dist.FileStore(f"{folder}/store", world_size)
                dist.init_process_group(
                    "nccl", store=store, rank=rank, world_size=world_size
                )
                run(world_size, dim)
                os._exit(0)
            pids.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(max(map(os.waitstatus_to_exitcode, statuses), key=abs))


if __name__ == "__main__":
    main()
