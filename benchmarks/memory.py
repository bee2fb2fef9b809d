"""Peak bytes of tensor memory per rank: measured exactly, and computed.

    python benchmarks/memory.py

Full fine-tuning, LoRA inside the units, and gradient accumulation with HYBRID_SHARD,
of one transformer with AdamW over gloo (fsdp_c with FSDP_C_SHM=0). memory_trace.py
counts, memory_arithmetic.py computes the expected bytes.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import memory_worker
import torch
from common import (
    Json,
    command_line,
    environment,
    environment_line,
    format_table,
    positive_int,
    run_workers,
    write_json,
)
from implementations import FSDP1_ORIG, FSDP2, FSDP_C_ORIG, LABELS, why_unavailable
from memory_arithmetic import COMPUTE, Memory
from memory_trace import build_counter
from memory_worker import FULL, HSDP, LORA, NUM_RANKS, NUM_SHARD_RANKS, SHARDED
from memory_worker import UNSHARDED as UNSHARDED_SUM
from tqdm import tqdm

LOSS_TOLERANCE = 1e-3  # all implementations must have trained the same model
MIB = 2**20

TITLES = {
    FULL: "Full fine-tuning, {num_ranks} ranks",
    LORA: (
        "LoRA of rank {lora_rank}, adapters and frozen weights in one unit, "
        "{num_ranks} ranks"
    ),
    HSDP: (
        "Accumulation over {micro_batches} micro-batches, HYBRID_SHARD on 2 x 2 ranks"
    ),
}
IMPLEMENTATIONS = [FSDP_C_ORIG, FSDP1_ORIG, FSDP2]
# Scenario, implementation, how gradients are accumulated, the row's name.
ACCUMULATIONS = [
    (FSDP_C_ORIG, UNSHARDED_SUM, "fsdp_c, no_sync()"),
    (FSDP_C_ORIG, SHARDED, "fsdp_c, no_sync(sharded=True)"),
    (FSDP1_ORIG, UNSHARDED_SUM, "torch FSDP1, no_sync()"),
    (FSDP2, UNSHARDED_SUM, "torch FSDP2, set_requires_gradient_sync(False)"),
    (FSDP2, SHARDED, "torch FSDP2, set_requires_all_reduce(False)"),
]
JOBS: list[tuple[str, str, str | None, str]] = [
    *((FULL, name, None, LABELS[name]) for name in IMPLEMENTATIONS),
    *((LORA, name, None, LABELS[name]) for name in IMPLEMENTATIONS),
    *((HSDP, *accumulation) for accumulation in ACCUMULATIONS),
]

DEFAULTS = {
    "layers": 8,
    "dim": 256,
    "heads": 4,
    "lora_rank": 8,
    "batch": 4,
    "time": 64,
    "micro_batches": 2,
}


def _compute(
    scenario: str, implementation: str, accumulation: str | None, settings: Json
) -> dict[str, Memory]:
    """Return the computed memory with gloo and without its buffers."""
    names = ("layers", "dim", "heads", "lora_rank")
    with torch.device("meta"):
        model = memory_worker.create_model(
            scenario, **{name: settings[name] for name in names}
        )
    return {
        key: COMPUTE[implementation](
            model, NUM_SHARD_RANKS, gloo=key == "gloo", accumulation=accumulation
        )
        for key in ("gloo", "plain")
    }


def _measured(result: Json) -> Json:
    """Return the peaks of one worker's result in bytes.

    What the one-byte step has at its peak is split by kind; what a batch adds to
    that peak are activations.
    """

    def highest(name: str) -> Json:
        phases = [
            phase
            for key, phase in result["phases"].items()
            if key.startswith(f"{name}: ")
        ]
        peak: Json = max(phases, key=lambda phase: phase["peak"])
        return peak

    small = highest(memory_worker.ONE_BYTE)
    kinds = small["by_kind"]
    total = highest(memory_worker.BATCH)["peak"]
    return {
        "parameters": kinds["parameters"],
        "gradients": kinds.get("gradients", 0),
        "optimizer": kinds["optimizer state"],
        "unsharded": kinds["rest"],
        "without_activations": small["peak"],
        "activations": total - small["peak"],
        "total": total,
        "between_steps": result["phases"][f"{memory_worker.ONE_BYTE}: begin"][
            "at_begin"
        ],
    }


def _run_job(
    job: tuple[str, str, str | None, str], settings: Json, environ: dict[str, str]
) -> tuple[Json, str | None]:
    """Return the row of one job, and why it could not be measured, if so."""
    scenario, name, accumulation, label = job
    computed = _compute(scenario, name, accumulation, settings)
    row: Json = {
        "scenario": scenario,
        "implementation": name,
        "label": label,
        "computed": {
            key: {**vars(value), "total": value.total}
            for key, value in computed.items()
        },
    }
    reason = why_unavailable(name)
    wants_sharded_sum = name == FSDP_C_ORIG and accumulation == SHARDED
    if wants_sharded_sum and not memory_worker.has_sharded_no_sync():
        reason = reason or "this fsdp_c has no no_sync(sharded=True)"
    if reason is not None:
        return row, reason
    arguments = [__file__, "--worker", name, "--scenario", scenario]
    arguments += ["--accumulation", accumulation or UNSHARDED_SUM]
    for option, value in settings.items():
        arguments += [f"--{option.replace('_', '-')}", str(value)]
    try:
        result = run_workers(arguments, num_ranks=NUM_RANKS[scenario], environ=environ)
    except RuntimeError as error:
        last_line = str(error).strip().splitlines()[-1]
        return row, last_line.partition("]: ")[2] or last_line
    row["measured"] = _measured(result)
    row |= {"loss": result["loss"], "details": result}
    return row, None


def measure(scenarios: list[str], **settings: int) -> Json:
    """Run all implementations and return the results.

    Args:
        scenarios: Which of FULL, LORA, HSDP.
        settings: Those of ``DEFAULTS`` that differ.

    Raises:
        RuntimeError: The implementations' losses differ: one trained wrongly.
    """
    all_settings: Json = {**DEFAULTS, **settings}
    jobs = [job for job in JOBS if job[0] in scenarios]
    rows: list[Json] = []
    notices: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fsdp_c-benchmark-") as folder:
        environ = {"LD_PRELOAD": str(build_counter(Path(folder)))}
        for job in tqdm(jobs, unit="run", leave=False):
            row, reason = _run_job(job, all_settings, environ)
            rows.append(row)
            if reason is not None:
                notices.append(f"{job[3]} ({job[0]}) was not measured: {reason}")
    for scenario in scenarios:
        losses = {
            row["label"]: row["loss"]
            for row in rows
            if row["scenario"] == scenario and "loss" in row
        }
        if not losses:
            continue
        spread = max(losses.values()) - min(losses.values())
        if not spread <= LOSS_TOLERANCE or not math.isfinite(spread):
            raise RuntimeError(f"{scenario}: losses differ: {losses}")
    return {
        "benchmark": "memory",
        "command": command_line(),
        "environment": environment(),
        "settings": all_settings,
        "notices": notices,
        "results": rows,
    }


def describe(data: Json) -> str:
    """Return the model and its inputs in words."""
    settings = data["settings"]
    return (
        f"{settings['layers']} blocks, width {settings['dim']}, fp32, AdamW "
        f"(fused), {settings['batch']} x {settings['time']} bytes per rank and backward"
    )


def title(data: Json, scenario: str) -> str:
    """Return the heading of one scenario's table."""
    return TITLES[scenario].format(num_ranks=NUM_RANKS[scenario], **data["settings"])


def scenarios_of(data: Json) -> list[str]:
    """Return the scenarios that were run."""
    return list(dict.fromkeys(row["scenario"] for row in data["results"]))


def render(data: Json, scenario: str, *, markdown: bool) -> str:
    """Return the results of one scenario as a table, in MiB."""

    def mib(values: dict[str, Any] | None, key: str) -> str:
        return "-" if values is None else f"{values[key] / MIB:.1f}"

    measured = (
        "parameters",
        "gradients",
        "optimizer",
        "unsharded",
        "without_activations",
    )
    rows = []
    for row in data["results"]:
        if row["scenario"] != scenario:
            continue
        found = row.get("measured")
        cells = [row["label"], *(mib(found, key) for key in measured)]
        cells += [mib(row["computed"][key], "total") for key in ("gloo", "plain")]
        rows.append([*cells, mib(found, "activations"), mib(found, "total")])
    headers = [
        "MiB per rank",
        "parameters",
        "gradients",
        "optimizer",
        "unsharded",
        "sum",
        "computed",
        "without gloo",
        "activations",
        "peak",
    ]
    return format_table(headers, rows, markdown=markdown)


def main() -> int:
    """Run the benchmark, or one worker of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in DEFAULTS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=positive_int, default=default)
    parser.add_argument("--only", nargs="+", choices=list(TITLES), help="scenarios")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument(
        "--markdown", action="store_true", help="print the tables as markdown"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--worker-folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--scenario", help=argparse.SUPPRESS)
    parser.add_argument("--accumulation", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.layers < 3:
        parser.error("--layers must be at least 3: the arithmetic wants a middle")
    if args.dim % args.heads != 0:
        parser.error(f"--dim {args.dim} is no multiple of --heads {args.heads}")
    if args.worker is not None:
        memory_worker.run(args)
        return 0
    settings = {name: getattr(args, name) for name in DEFAULTS}
    data = measure(args.only or list(TITLES), **settings)
    print(environment_line(data["environment"]))
    print(describe(data))
    for scenario in scenarios_of(data):
        print(f"\n{title(data, scenario)}")
        print(render(data, scenario, markdown=args.markdown))
    for notice in data["notices"]:
        print(notice, file=sys.stderr)
    if args.json is not None:
        write_json(Path(args.json), data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
