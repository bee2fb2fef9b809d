"""Time, memory and launches of a training step on GPUs, one rank per GPU.

    python benchmarks/gpu_step.py                # on a machine with GPUs
    python benchmarks/gpu_step.py --fake-world 8 # on one GPU, as rank 0 of 8
    python benchmarks/gpu_step.py --device cpu   # does it run at all? 2 ranks, gloo

Three GPTs in bf16 with fp32 shards: one with kernels so short that the host is the
limit, two with long kernels. fsdp_c with both APIs, FSDP1 and FSDP2 run in processes of
their own, interleaved. Without a GPU, columns that need one are dashes.

A fake world is one process: torch's FakeProcessGroup copies locally and sends nothing.
Shards have their real sizes, so host time, kernels, host waits and memory are those of
a real rank. Losses and the time of collectives mean nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from common import (
    Json,
    command_line,
    environment_line,
    format_table,
    join_fake_group,
    joined_group,
    make_parser,
    ratio,
    report_result,
    run_interleaved,
    write_json,
)
from torch.profiler import ProfilerActivity, profile

from fsdp_c._text import positive_int
from fsdp_c.tools.bench import _worker
from fsdp_c.tools.bench._command import machine
from fsdp_c.tools.bench._implementations import FSDP1, FSDP2, OURS, OURS_FULLY
from fsdp_c.tools.bench._report import differences, smallest
from fsdp_c.tools.bench._workload import Workload

IMPLEMENTATIONS = [OURS, OURS_FULLY, FSDP1, FSDP2]
HOST_WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMalloc",
    "cudaFree",
)


def _workload(
    device: str, width: int, num_layers: int, batch: int, length: int
) -> Workload:
    """Return a workload in bf16; its steps are counted, not timed."""
    ranks_and_seconds = {"num_ranks": 0, "seconds": 0.0}
    model = {"width": width, "num_layers": num_layers, "vocabulary": 256}
    return Workload(
        device=device,
        batch=batch,
        length=length,
        dtype="bfloat16",
        recomputes=False,
        **model,
        **ranks_and_seconds,
    )


WORKLOADS = {
    "cuda": {
        "host-bound": _workload("cuda", 512, 24, 1, 64),
        "compute-bound": _workload("cuda", 2048, 12, 8, 1024),
        "wide": _workload("cuda", 4096, 4, 2, 1024),
    },
    "cpu": {
        "host-bound": _workload("cpu", 64, 3, 1, 8),
        "compute-bound": _workload("cpu", 128, 2, 2, 32),
        "wide": _workload("cpu", 256, 1, 1, 16),
    },
}


def why_no_gpu() -> str | None:
    """Return why there is no GPU to measure, None if there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU (nvidia-smi tells whether the driver does)"
    return None


class Trainer(_worker.Trainer):
    """One implementation's model, optimizer and batch."""

    def medians(self, num_steps: int) -> tuple[float, float]:
        """Return the medians of a step and of the host's part of it, in ms."""
        steps, hosts = self.times(num_steps, group_size=1)
        return statistics.median(steps), statistics.median(hosts)

    def events(self) -> tuple[list[Json], int]:
        """Return what ran in one step, and how many calls made the host wait.

        On the device, or on the CPU torch's operators.
        """
        activities = [ProfilerActivity.CPU]
        on_gpu = self.on_gpu
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


def run_worker(args: argparse.Namespace) -> None:
    """Join the other ranks, train, report."""
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
    if args.fake_world:
        join_fake_group(args.fake_world)
        report_result(args, measure(args))
        return
    backend = "nccl" if args.device == "cuda" else "gloo"
    with joined_group(args, backend):
        report_result(args, measure(args))


def measure(args: argparse.Namespace) -> Json:
    """Train one implementation; return what this rank saw."""
    workload = WORKLOADS[args.device][args.workload]
    trainer = Trainer(args.worker, workload, offloads=args.offload)
    if args.offload:  # the host's optimizer would be most of the step
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    num_losses = 0 if args.fake_world else min(_worker.NUM_LOSSES, args.warmup)
    result: Json = {"losses": trainer.first_losses(num_losses)}
    for _ in range(args.warmup - num_losses):
        trainer.step()
    if trainer.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    result["step_ms"], result["host_ms"] = trainer.medians(args.steps)
    if trainer.on_gpu:
        result["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        result["reserved_mib"] = torch.cuda.max_memory_reserved() / 2**20
    result["events"], result["num_waits"] = trainer.events()
    if trainer.on_gpu:
        num_units = workload.num_layers + 1
        kernels = [e for e in result["events"] if not e["name"].startswith("Mem")]
        result["launches_per_unit"] = len(kernels) / num_units
    return result


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


def table_of(results: dict[str, list[Json]], *, markdown: bool) -> str:
    """Return the figures of one workload, each the best of its rounds."""
    rows: list[Sequence[str]] = []
    reference: float | None = None
    for name, rounds in results.items():
        step_ms = smallest(rounds, "step_ms")
        reference = reference or step_ms
        on_gpu = "peak_mib" in rounds[0]
        rows.append(
            (
                name,
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
    parser = make_parser(__doc__, steps=30, warmup=10, rounds=3)
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
        "--offload", action="store_true", help="shards in host memory; SGD"
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
    options = ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    options += ["--device", args.device]
    if args.fake_world:
        options += ["--fake-world", str(args.fake_world)]
    if args.offload:
        options.append("--offload")
    jobs = {
        f"{workload}: {name}": [
            *(__file__, "--worker", name, "--workload", workload, *options)
        ]
        for workload in workloads
        for name in IMPLEMENTATIONS
    }
    results = run_interleaved(jobs, num_rounds=args.rounds, num_ranks=num_ranks)
    env = machine(args.device)
    gpu = f"{num_ranks} x {env['gpu']}" if "gpu" in env else ""
    print(environment_line(env), gpu or "CPU: a trial, not a measurement")
    print(f"$ {command_line()}")
    if args.offload:
        print("shards in host memory; SGD with a learning rate of 0")
    if args.fake_world:
        print(f"rank 0 of a fake world of {args.fake_world}: nothing is sent")
    wrong = []
    for name in workloads:
        workload = replace(WORKLOADS[args.device][name], num_ranks=num_ranks)
        its_results = {each: results[f"{name}: {each}"] for each in IMPLEMENTATIONS}
        print(f"\n{name}: {workload.describe()}")
        print(table_of(its_results, markdown=args.markdown))
        wrong += [f"{name}: {line}" for line in differences(workload, its_results)]
    if args.timeline is not None:
        draw(results, args.timeline)
    if args.json is not None:
        for rounds in results.values():
            for result in rounds:
                del result["events"]  # thousands: they are for the picture
        write_json(args.json, {"environment": env, "results": results})
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
