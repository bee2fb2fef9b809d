"""Training on GPUs against the same model on the CPU; skipped where there is none.

Every test starts fresh processes, one per rank, that run a scenario of scenarios.py.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from scenarios import check_changes

from helpers.one_gpu import one_gpu_environment

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
    "captured_step",
)

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_a_gpu = pytest.mark.skipif(NUM_GPUS < 1, reason="there is no CUDA GPU")
needs_gpus = pytest.mark.skipif(
    NUM_GPUS < 2, reason=f"needs 2 CUDA GPUs, there are {NUM_GPUS}"
)


def run(
    name: str,
    folder: Path,
    *,
    kind: str,
    world_size: int,
    environ: Mapping[str, str] | None = None,
    environ_of_rank: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> None:
    """Run a scenario on all ranks; fail with what the first failing one printed."""
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    processes = []
    for rank, log in enumerate(logs):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
        env.update(environ or {})
        env.update(environ_of_rank(rank))
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


@pytest.mark.only_full
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
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_on_one_gpu(name: str, tmp_path: Path) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    run(
        name,
        tmp_path,
        kind="cuda",
        world_size=2,
        environ={"CUDA_VISIBLE_DEVICES": visible},
        environ_of_rank=one_gpu_environment,
    )


@pytest.mark.parametrize("tolerance", [1e-3, 5e-2])
def test_an_untrained_model_is_found_out(tolerance: float) -> None:
    before = [torch.ones(8), torch.zeros(3)]
    expected = [torch.ones(8) * (1 + 1e-3), torch.full((3,), 1e-4)]
    check_changes(before, expected, expected, tolerance)
    close = [param * (1 + 1e-7) for param in expected]
    check_changes(before, close, expected, tolerance)
    with pytest.raises(AssertionError, match=r"parameter 0 .* off by 100\.00%"):
        check_changes(before, before, expected, tolerance)
    with pytest.raises(AssertionError, match="parameter 0 did not move"):
        check_changes(before, before, before, tolerance)
