"""Time, memory and launches of a training step on GPUs, one rank per GPU.

    python benchmarks/gpu_step.py                # on a machine with GPUs
    python benchmarks/gpu_step.py --fake-world 8 # on one GPU, as rank 0 of 8
    python benchmarks/gpu_step.py --device cpu   # does it run at all? 2 ranks, gloo

Three GPTs in bf16 with fp32 shards: one with kernels so short that the host is the
limit, two with long kernels. fsdp_c, FSDP1 and FSDP2 run in processes of their own,
interleaved. Without a GPU, columns that need one are dashes.

A fake world is one process: torch's FakeProcessGroup copies locally and sends nothing.
Shards have their real sizes, so host time, kernels, host waits and memory are those of
a real rank. Losses and the time of collectives mean nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Json,
    add_common_arguments,
    command_line,
    environment,
    environment_line,
    format_table,
    positive_int,
    ratio,
    report_result,
    run_interleaved,
    smallest,
    write_json,
)
from implementations import (
    FSDP1_ORIG,
    FSDP2,
    FSDP_C_ORIG,
    GPT,
    LABELS,
    NUM_BYTES,
    Block,
    why_unavailable,
)
from torch import nn
from torch.profiler import ProfilerActivity, profile

IMPLEMENTATIONS = [FSDP_C_ORIG, FSDP1_ORIG, FSDP2]
# The first losses, by how much they may differ. The first is of equal weights; the
# next ones follow updates of gradients in bf16. Later ones are chaotic.
NUM_LOSSES = 4
FIRST_LOSS_TOLERANCE = 5e-3
LOSS_TOLERANCE = 5e-2
HOST_WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMalloc",
    "cudaFree",
)


@dataclass(frozen=True)
class Workload:
    """A GPT whose attention heads are 64 wide, and its batch."""

    width: int
    num_blocks: int
    batch: int
    time: int

    def create(self) -> GPT:
        """Return the same initial model on every rank and in every run."""
        torch.manual_seed(0)
        return GPT(self.width, self.num_blocks, self.width // 64)


WORKLOADS = {
    "cuda": {
        "host-bound": Workload(512, 24, 1, 64),
        "compute-bound": Workload(2048, 12, 8, 1024),
        "wide": Workload(4096, 4, 2, 1024),
    },
    "cpu": {
        "host-bound": Workload(64, 3, 1, 8),
        "compute-bound": Workload(128, 2, 2, 32),
        "wide": Workload(256, 1, 1, 16),
    },
}


def why_no_gpu() -> str | None:
    """Return why there is no GPU to measure, None if there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU (nvidia-smi tells whether the driver does)"
    return None


def parallelise(
    model: nn.Module,
    name: str,
    device: torch.device,
    dtype: torch.dtype | None = torch.bfloat16,
) -> nn.Module:
    """Return ``model`` sharded, one unit per block, computing and reducing in dtype."""
    if name == FSDP2:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = model.to(device)
        policy = MixedPrecisionPolicy(dtype, dtype)
        for block in model.modules():
            if isinstance(block, Block):
                fully_shard(block, mp_policy=policy)
        sharded: nn.Module = fully_shard(model, mp_policy=policy)
        return sharded
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        MixedPrecision,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapper: Any = FullyShardedDataParallel
    if name == FSDP_C_ORIG:
        import fsdp_c

        wrapper = fsdp_c.FullyShardedDataParallel
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
    wrapped: nn.Module = wrapper(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=precision if dtype else None,
        use_orig_params=True,
        device_id=device,
    )
    return wrapped


class Trainer:
    """One implementation's model, optimizer and batch."""

    def __init__(
        self,
        workload: Workload,
        name: str,
        device: torch.device,
        dtype: torch.dtype | None = torch.bfloat16,
    ) -> None:
        """Shard the model and put this rank's batch on the device."""
        self.device = device
        self.model = parallelise(workload.create(), name, device, dtype)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, foreach=True
        )
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        shape = (workload.batch, workload.time + 1)
        tokens = torch.randint(NUM_BYTES, shape, generator=generator).to(device)
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]
        self.loss = torch.zeros((), device=device)

    def step(self) -> None:
        """Forward, backward, clip nothing, update."""
        self.loss = self.model(self.inputs, self.targets)
        self.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        """Wait until the device has done all of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def times(self, num_steps: int) -> tuple[float, float]:
        """Return the medians of a step and of the host's part of it, in ms."""
        steps, hosts = [], []
        for _ in range(num_steps):
            self.wait()
            begin = time.perf_counter_ns()
            self.step()
            hosts.append(time.perf_counter_ns() - begin)
            self.wait()
            steps.append(time.perf_counter_ns() - begin)
        return statistics.median(steps) / 1e6, statistics.median(hosts) / 1e6

    def losses(self, num_steps: int) -> list[float]:
        """Train; return the mean over the ranks of each loss."""
        losses = []
        for _ in range(num_steps):
            self.step()
            mean = self.loss.detach().float().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
        return losses

    def events(self) -> tuple[list[Json], int]:
        """Return what ran in one step, and how many calls made the host wait.

        On the device, or on the CPU torch's operators.
        """
        activities = [ProfilerActivity.CPU]
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            self.step()
            self.wait()
        wanted = torch.autograd.DeviceType.CUDA if on_gpu else None
        found = []
        num_waits = sum(event.name in HOST_WAITS for event in profiler.events())
        num_waits -= int(on_gpu)  # our own
        for event in profiler.events():
            if on_gpu and event.device_type != wanted:
                continue
            if not on_gpu and event.cpu_parent is not None:
                continue
            found.append(
                {
                    "name": event.name,
                    "lane": event.device_resource_id if on_gpu else event.thread,
                    "begin_us": event.time_range.start,
                    "end_us": event.time_range.end,
                }
            )
        return found, num_waits


def join(args: argparse.Namespace, rank: int, world_size: int) -> None:
    """Make the process group: of the other processes, or of none."""
    if args.fake_world:
        # private, and the only way to torch's FakeProcessGroup
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(
            "fake", rank=0, world_size=args.fake_world, store=FakeStore()
        )
        return
    rendezvous = (args.worker_folder / "store").as_uri()
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, rendezvous, rank=rank, world_size=world_size)


def run_worker(args: argparse.Namespace) -> None:
    """Join the other ranks, train, report."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    join(args, rank, world_size)
    workload = WORKLOADS[args.device][args.workload]
    trainer = Trainer(workload, args.worker, device)
    num_losses = 0 if args.fake_world else min(NUM_LOSSES, args.warmup)
    result: Json = {"losses": trainer.losses(num_losses)}
    for _ in range(args.warmup - num_losses):
        trainer.step()
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    result["step_ms"], result["host_ms"] = trainer.times(args.steps)
    if args.device == "cuda":
        result["peak_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
        result["reserved_mib"] = torch.cuda.max_memory_reserved(device) / 2**20
    result["events"], result["num_waits"] = trainer.events()
    if args.device == "cuda":
        num_units = workload.num_blocks + 1
        kernels = [e for e in result["events"] if not e["name"].startswith("Mem")]
        result["launches_per_unit"] = len(kernels) / num_units
    if rank == 0:
        report_result(args.worker_folder, result)
    if not args.fake_world:
        dist.barrier()
    dist.destroy_process_group()


def draw(results: dict[str, list[Json]], path: Path) -> None:
    """Draw a timeline of one step: a panel per job, a row per stream."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(results), 1, figsize=(12, 2.2 * len(results)), squeeze=False
    )
    for panel, (name, rounds) in zip(panels[:, 0], results.items(), strict=True):
        events = rounds[-1]["events"]
        lanes = sorted({event["lane"] for event in events})
        first = min(event["begin_us"] for event in events)
        for row, lane in enumerate(lanes):
            bars = [
                ((e["begin_us"] - first) / 1e3, (e["end_us"] - e["begin_us"]) / 1e3)
                for e in events
                if e["lane"] == lane
            ]
            panel.broken_barh(bars, (row - 0.4, 0.8), linewidth=0)
        panel.set_yticks(range(len(lanes)), [str(lane) for lane in lanes])
        panel.set_title(name, fontsize=9, loc="left")
    panels[-1, 0].set_xlabel("ms; a row is a stream (on the CPU: a thread)")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def differences(results: dict[str, list[Json]], workload: str) -> list[str]:
    """Say at which steps the implementations' losses show that models differ."""
    losses = {
        job.partition(": ")[2]: rounds[0]["losses"]
        for job, rounds in results.items()
        if job.startswith(f"{workload}: ")
    }
    found = []
    for step, values in enumerate(zip(*losses.values(), strict=True)):
        limit = (LOSS_TOLERANCE if step else FIRST_LOSS_TOLERANCE) * max(values)
        is_known = all(math.isfinite(value) for value in values)
        if not is_known or max(values) - min(values) > limit:
            by_name = ", ".join(
                f"{name} {value:.4f}"
                for name, value in zip(losses, values, strict=True)
            )
            found.append(f"{workload}: the losses of step {step} differ: {by_name}")
    return found


def table_of(results: dict[str, list[Json]], workload: str, *, markdown: bool) -> str:
    """Return the figures of one workload, each the best of its rounds."""
    rows: list[Sequence[str]] = []
    reference: float | None = None
    for job, rounds in results.items():
        if not job.startswith(f"{workload}: "):
            continue
        step_ms = smallest(rounds, "step_ms")
        reference = reference or step_ms
        on_gpu = "peak_mib" in rounds[0]
        rows.append(
            (
                job.partition(": ")[2],
                f"{step_ms:.2f}",
                ratio(step_ms, reference),
                f"{smallest(rounds, 'host_ms'):.2f}",
                f"{smallest(rounds, 'peak_mib'):.0f}" if on_gpu else "-",
                f"{smallest(rounds, 'reserved_mib'):.0f}" if on_gpu else "-",
                f"{smallest(rounds, 'launches_per_unit'):.1f}" if on_gpu else "-",
                f"{smallest(rounds, 'num_waits'):.0f}" if on_gpu else "-",
            )
        )
    headers = (
        *("", "step ms", "/ fsdp_c", "host ms", "peak MiB", "reserved MiB"),
        *("launches per unit", "host waits"),
    )
    return format_table(headers, rows, markdown=markdown)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_common_arguments(parser, steps=30, warmup=10, rounds=3)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--ranks", type=positive_int, help="processes (default: all GPUs; 2 on the CPU)"
    )
    parser.add_argument(
        "--fake-world",
        type=positive_int,
        metavar="N",
        help="one process, as rank 0 of N, of which the others do not exist",
    )
    parser.add_argument(
        "--workload", choices=list(WORKLOADS["cuda"]), help="only this one"
    )
    parser.add_argument(
        "--timeline", type=Path, help="draw one step of every job into this picture"
    )
    return parser.parse_args()


def main() -> int:
    """Run all jobs and print their figures."""
    args = parse_args()
    if args.worker is not None:
        run_worker(args)
        return 0
    reason = why_no_gpu() if args.device == "cuda" else None
    if reason is not None:
        print(
            f"error: {reason}. This benchmark measures GPUs; `--device cpu` only tries "
            "out its code.",
            file=sys.stderr,
        )
        return 2
    num_gpus = torch.cuda.device_count() if args.device == "cuda" else 2
    num_ranks = 1 if args.fake_world else args.ranks or num_gpus
    if args.device == "cuda" and num_ranks > num_gpus:
        print(
            f"error: --ranks {num_ranks} on {num_gpus} GPUs, at most one rank per GPU",
            file=sys.stderr,
        )
        return 2
    workloads = [args.workload] if args.workload else list(WORKLOADS[args.device])
    names = [name for name in IMPLEMENTATIONS if why_unavailable(name) is None]
    options = ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    if args.fake_world:
        options += ["--fake-world", str(args.fake_world)]
    jobs = {
        f"{workload}: {LABELS[name]}": [
            *(__file__, "--worker", name, "--workload", workload),
            *("--device", args.device, *options),
        ]
        for workload in workloads
        for name in names
    }
    results = run_interleaved(jobs, num_rounds=args.rounds, num_ranks=num_ranks)
    env = environment()
    if args.device == "cuda":
        env["gpu"] = f"{num_ranks} x {torch.cuda.get_device_name()}"
        env["cuda"] = torch.version.cuda
    print(environment_line(env), env.get("gpu", "CPU: a trial, not a measurement"))
    print(f"$ {command_line()}")
    if args.fake_world:
        print(f"rank 0 of a fake world of {args.fake_world}: nothing is sent")
    for workload in workloads:
        print(f"\n{workload}: {WORKLOADS[args.device][workload]}")
        print(table_of(results, workload, markdown=args.markdown))
    if args.timeline is not None:
        draw(results, args.timeline)
    if args.json is not None:
        for rounds in results.values():
            for result in rounds:
                del result["events"]  # thousands: they are for the picture
        write_json(args.json, {"environment": env, "results": results})
    wrong = [line for each in workloads for line in differences(results, each)]
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
