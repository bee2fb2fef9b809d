"""One job of gpu_session.sh: a few processes that train and say how it went.

    python tests/cuda/session/gpu_probe.py --group nccl --ranks 2       # on one GPU
    python tests/cuda/session/gpu_probe.py --group gloo --device cpu    # a trial

All processes use one GPU (helpers.one_gpu). The result is a line of JSON on stdout, and
one more in the file --json. With --group fake there is one process, rank 0 of
--fake-world; collectives are local copies.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests")]

import gpu_step  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from fsdp_c.tools.bench._implementations import FSDP1, FSDP2, OURS, OURS_FULLY  # noqa: E402
from helpers.one_gpu import one_gpu_environment  # noqa: E402

Json = dict[str, Any]
IMPLEMENTATIONS = {
    **{"fsdp_c": OURS, "fully_shard": OURS_FULLY},
    **{"fsdp1": FSDP1, "fsdp2": FSDP2},
}
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
LOG_TAIL_CHARS = 3500
# A capture waits longer than two rounds of the NCCL watchdog.
CAPTURE_S = 0.45


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--impl", choices=list(IMPLEMENTATIONS), default="fsdp_c")
    add("--group", choices=["fake", "nccl", "gloo"], default="fake", help="backend")
    add("--ranks", type=int, default=1, help="processes (default: %(default)s)")
    add("--fake-world", type=int, default=8, help="ranks of a fake group")
    add("--workload", choices=list(gpu_step.WORKLOADS["cuda"]), default="host-bound")
    add("--precision", choices=list(PRECISIONS), default="bf16")
    add("--steps", type=int, default=20, help="steps that are timed")
    add("--warmup", type=int, default=5, help="steps before them")
    add("--losses", type=int, default=4, help="losses to report, of the first steps")
    add("--die-at", type=int, default=-1, help="step at which the last rank ends")
    add("--group-timeout", type=float, default=60.0, help="of the group, in seconds")
    add("--capture", action="store_true", help="capture a CUDA graph after each step")
    add("--captured", action="store_true", help="time captured steps, too")
    add("--profile", action="store_true", help="count kernels and waits of a step")
    add("--limit", type=float, default=150.0, help="of the job, in seconds")
    add("--label", default="", help="name of the job in the result")
    add("--json", type=Path, help="file that gets the result as a line")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


class Worker:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.device = torch.device(args.device)
        if args.device == "cuda":
            self.device = torch.device("cuda", 0)
            torch.cuda.set_device(self.device)
        self.found: Json = {
            **{name: vars(args)[name] for name in ("impl", "group", "workload")},
            **{name: vars(args)[name] for name in ("device", "precision", "label")},
            "ranks": self.world_size,
        }

    def run(self) -> Json:
        args = self.args
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(args.limit - 10, exit=True)
        self._join()
        workload = gpu_step.WORKLOADS[args.device][args.workload]
        self.trainer = gpu_step.Trainer(
            IMPLEMENTATIONS[args.impl],
            replace(workload, dtype=PRECISIONS[args.precision]),
        )
        self._warm_up()
        if args.impl == "fsdp_c" and args.group != "fake":
            from fsdp_c import _native

            transport = _native.transport(dist.group.WORLD, self.device)
            self.found["transport"] = list(transport)
        self._measure()
        if args.captured:
            self._measure_captured_steps()
        if args.profile:
            self._profile()
        if args.group != "fake":
            dist.barrier()
        dist.destroy_process_group()
        return self.found

    def _join(self) -> None:
        args = self.args
        if args.group == "fake":
            # private, and the only way to torch's FakeProcessGroup
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group(
                "fake", rank=0, world_size=args.fake_world, store=FakeStore()
            )
            return
        dist.init_process_group(
            args.group,
            init_method=(args.worker / "store").as_uri(),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=args.group_timeout),
        )

    def _warm_up(self) -> None:
        losses, captures = [], []
        for number in range(self.args.warmup):
            if number == self.args.die_at and self.rank == self.world_size - 1:
                os._exit(1)
            loss = self.trainer.step()
            if self.args.capture:
                captures.append(self._capture())
            if number < self.args.losses:
                mean = loss.float().clone()
                if self.args.group != "fake":
                    dist.all_reduce(mean)
                losses.append(mean.item() / self.world_size)
        self.found["losses"] = losses
        if captures:
            self.found["captures"] = captures

    def _capture(self) -> str:
        graph = torch.cuda.CUDAGraph()
        value = torch.zeros(8, device=self.device)
        try:
            with torch.cuda.graph(graph):  # error mode "global", as by default
                value.add_(1)
                time.sleep(CAPTURE_S)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return "ok"

    def _measure(self) -> None:
        on_gpu = self.args.device == "cuda"
        num_allocs = "num_device_alloc"
        before = 0
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_stats(self.device).get(num_allocs, 0)
        self.found["step_ms"], self.found["host_ms"] = self.trainer.medians(
            self.args.steps
        )
        if not on_gpu:
            return
        after = torch.cuda.memory_stats(self.device).get(num_allocs, 0)
        free, total = torch.cuda.mem_get_info(self.device)
        self.found |= {
            "peak_mib": torch.cuda.max_memory_allocated(self.device) / 2**20,
            "reserved_mib": torch.cuda.max_memory_reserved(self.device) / 2**20,
            "device_used_mib": (total - free) / 2**20,  # of all processes, NCCL too
            "cuda_mallocs": after - before,
            "capture_safe": all(c == "ok" for c in self.found.get("captures", [])),
        }

    def _measure_captured_steps(self) -> None:
        """Time steps with an optimizer that can be captured, without and with it."""
        import fsdp_c

        trainer = self.trainer
        params = trainer.model.parameters()
        trainer.optimizer = torch.optim.AdamW(
            params, lr=3e-4, foreach=True, capturable=True
        )
        for name in ("capturable", "captured"):
            if name == "captured":
                trainer.step = fsdp_c.capture_step(
                    trainer.step, trainer.model, trainer.optimizer
                )
            for _ in range(self.args.warmup):
                trainer.step()
            step_ms, host_ms = trainer.medians(self.args.steps)
            self.found |= {f"{name}_step_ms": step_ms, f"{name}_host_ms": host_ms}

    def _profile(self) -> None:
        events, self.found["num_waits"] = self.trainer.events()
        kernels = [e for e in events if not e["name"].startswith("Mem")]
        own = [e for e in kernels if "fsdp_cuda" in e["name"]]
        self.found |= {
            "kernels": len(kernels),
            "own_kernels": len(own),
            "own_kernels_us": sum(e["end_us"] - e["begin_us"] for e in own),
        }


def run_worker(args: argparse.Namespace) -> int:
    """Write this rank's result, or its error, into the folder of the job."""
    begin = time.monotonic()
    worker = Worker(args)
    try:
        found = worker.run()
    except Exception as error:
        traceback.print_exc()
        found = {**worker.found, "error": str(error)[:1500]}
    found["seconds"] = time.monotonic() - begin
    (args.worker / f"rank{worker.rank}.json").write_text(json.dumps(found))
    return 1 if "error" in found else 0


def start(args: argparse.Namespace, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(args.ranks),
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if args.group == "nccl" and args.ranks > 1:
        env.update(one_gpu_environment(rank))
        env.setdefault("NCCL_DEBUG", "WARN")
    with (folder / f"rank{rank}.log").open("wb") as log:
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(folder)]
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def run_job(args: argparse.Namespace, folder: Path) -> Json:
    """Run all ranks; return the first one's result, with all exit codes."""
    processes = [start(args, rank, folder) for rank in range(args.ranks)]
    deadline = time.monotonic() + args.limit
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    path = folder / "rank0.json"
    result: Json = {"label": args.label, "error": "rank 0 ended without a result"}
    if path.exists():
        result = json.loads(path.read_text())
    result["codes"] = [process.returncode for process in processes]
    return result


def main() -> int:
    args = parse_args()
    if args.worker is not None:
        return run_worker(args)
    with tempfile.TemporaryDirectory(prefix="gpu_probe-") as name:
        folder = Path(name)
        result = run_job(args, folder)
        print(json.dumps(result))
        is_bad = any(result["codes"]) or "error" in result
        if is_bad:
            for rank, code in enumerate(result["codes"]):
                text = (folder / f"rank{rank}.log").read_text(errors="replace")
                print(f"--- rank {rank}, exit {code}:\n{text[-LOG_TAIL_CHARS:]}")
    if args.json is not None:
        with args.json.open("a") as file:
            file.write(json.dumps(result) + "\n")
    if args.die_at >= 0:  # the point: rank 0 raises in time, and does not hang
        limit = args.group_timeout + 30
        is_told = "error" in result and result.get("seconds", limit) < limit
        return 0 if is_told else 1
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
