"""Training on GPUs against the same model on the CPU; skipped where there is none.

Every test starts fresh processes, one per rank, that run a scenario of scenarios.py.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from helpers.impl import IS_TORCH

SCRIPT = Path(__file__).with_name("scenarios.py")
TIMEOUT_S = 300.0
NAMES = (
    "full_shard",
    "no_shard",
    "shard_grad_op",
    "bf16",
    "gradient_accumulation",
    "memory",
    "launches",
)

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_a_gpu = pytest.mark.skipif(NUM_GPUS < 1, reason="there is no CUDA GPU")
needs_gpus = pytest.mark.skipif(
    NUM_GPUS < 2, reason=f"needs 2 CUDA GPUs, there are {NUM_GPUS}"
)
pytestmark = pytest.mark.skipif(IS_TORCH, reason="tests fsdp_c, not torch's FSDP")


def nccl_version() -> tuple[int, ...]:
    """Return NCCL's version, () without NCCL."""
    if NUM_GPUS < 1 or not torch.distributed.is_nccl_available():
        return ()
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return version


def run(
    name: str,
    folder: Path,
    *,
    kind: str,
    world_size: int,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Run a scenario on all ranks; fail with what the first failing one printed."""
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    processes = []
    for rank, log in enumerate(logs):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
        env.update(environ or {})
        with log.open("wb") as output:
            command = [sys.executable, str(SCRIPT), name, str(folder), kind]
            processes.append(
                subprocess.Popen(command, env=env, stdout=output, stderr=output)
            )
    deadline = time.monotonic() + TIMEOUT_S
    failed: list[int] = []
    while not failed and any(process.poll() is None for process in processes):
        failed = [i for i, p in enumerate(processes) if p.poll() not in (None, 0)]
        if time.monotonic() > deadline:
            failed = [i for i, p in enumerate(processes) if p.poll() is None]
        time.sleep(0.05)
    failed += [i for i, p in enumerate(processes) if p.poll() not in (None, 0)]
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    if failed:
        tail = logs[failed[0]].read_text(errors="replace")[-4000:]
        pytest.fail(f"rank {failed[0]} of {name!r}:\n{tail}")


@pytest.mark.parametrize("name", NAMES)
def test_the_scenarios_run_on_the_cpu(name: str, tmp_path: Path) -> None:
    run(name, tmp_path, kind="cpu", world_size=1)


@needs_a_gpu
@pytest.mark.parametrize("kernels", ["native", "ATen"])
@pytest.mark.parametrize("name", NAMES)
def test_one_rank(name: str, kernels: str, tmp_path: Path) -> None:
    if name == "launches" and kernels == "ATen":
        pytest.skip("counts launches of the native kernels")
    environ = {"FSDP_C_CUDA": "0"} if kernels == "ATen" else {}
    run(name, tmp_path, kind="cuda", world_size=1, environ=environ)


@needs_gpus
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_per_gpu(name: str, tmp_path: Path) -> None:
    run(name, tmp_path, kind="cuda", world_size=NUM_GPUS)


@needs_a_gpu
@pytest.mark.parametrize("name", ["full_shard", "bf16", "gradient_accumulation"])
def test_two_ranks_on_one_gpu(name: str, tmp_path: Path) -> None:
    if nccl_version() < (2, 30):
        pytest.skip(f"needs NCCL 2.30 or newer, this is {nccl_version()}")
    environ = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")[:1],
    }
    run(name, tmp_path, kind="cuda", world_size=2, environ=environ)
