"""Memory, calls and host time of a step on a device, without a GPU.

    python benchmarks/device.py                      # docs/measurements/device.md
    python benchmarks/device.py --only 8B experts    # prints these rows

Rank 0 of up to 64 ranks that do not exist trains models of real sizes on the fake CUDA
(docs/internals/fakecuda.md): torch's FSDP1 and FSDP2, both APIs of fsdp_c, and the bare
model, each in a process of its own. Needs a CUDA build of torch. What is held is what
torch's caching allocator says; nothing is computed, so times are the host's alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from common import (
    TIMED_HEADERS,
    Json,
    environment_line,
    format_table,
    join_fake_group,
    ratio,
    results_of,
    run_interleaved,
    timed_cells,
    timed_row,
    write_json,
)
from device_models import make_model, share_matrices
from device_rows import (
    DEVICE_NBYTES,
    PARAM_DTYPE,
    REDUCE_DTYPE,
    ROWS,
    UNSYNC,
    Row,
)
from implementations import BARE, FSDP1_ORIG, FSDP2, FSDP_C_FULLY, FSDP_C_ORIG, LABELS
from torch.distributed.device_mesh import init_device_mesh

from fsdp_c import _native
from fsdp_c._text import positive_int
from fsdp_c.tools.plan import ModelSource, Settings, Sharding, plan_model
from fsdp_c.tools.plan._trace import Inputs

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).resolve().with_name("device_worker.py")
MIB = 2**20
OURS = (FSDP_C_ORIG, FSDP_C_FULLY)
TORCHS = (FSDP1_ORIG, FSDP2)
IMPLEMENTATIONS = (BARE, *TORCHS, *OURS)

TEXT = """\
# A step on a device

Made by

    {command}

on {machine}.

The device is the [fake CUDA](../internals/fakecuda.md): no GPU took part. Rank 0 of a
group runs, the other ranks do not exist, and nothing is computed. **Memory** is what
torch's caching allocator holds, as on a GPU that is never behind the host. **Late**
memory is that of a GPU as far behind as the host lets it be: what an event guards is
taken until the host has waited for it, or for something that came later. A GPU that
has work all the time is nearer to the second. **Calls** are those of the CUDA runtime
and of NCCL. **Time** is that of the host's cores; the host waits for nothing here. A
GPU's speed is in none of these figures.

Shards and AdamW's state are in fp32. Parameters are used in bf16, and gradients are
reduced in fp32. Each layer is a unit; embedding, last norm and head are the root's.
Attention keeps what a fused kernel keeps. The bare model is in bf16 as a whole; its
memory is a dash where it needs more than 80 GiB. With CPU offload no optimizer runs.

- **peak**, **reserved**: the most that is allocated and reserved in the third step.
- **end of forward**: allocated when backward begins. **begin of backward**: when it
  comes to the last layer. **optimizer**: the peak of its step. **between**: when a step
  begins.
- **late peak**, **late reserved**: those two in a third step of a late device.
- **planned**: the peak that [plan](../guide/plan.md) predicts. **to planned**: the peak
  over it. **to torch's**, **late to torch's**: the peak over the smaller one of FSDP1
  and FSDP2.
- **records**, **waits**, **new events**: of CUDA events. On a late device fsdp_c makes
  up to two waits more for each unit, for collectives that are not done yet.
  **launches**: kernels of fsdp_c. **operators**: torch's. **collectives**: launches of
  NCCL. **pointers**: cudaPointerGetAttributes. **host waits**: synchronizing calls. All
  are those of a step beyond the bare model's, in brackets for each unit. A column of
  zeros is left out.
- **added per unit**: time above the bare model's, divided by the units. A time is the
  smallest median of {steps} steps, of each of {rounds} processes; what runs
  beside them on the machine makes it longer. That of FSDP2 contains what torch's
  optimizer does with DTensors; fsdp_c lends it shards.{notices}

{sections}
"""

HELD = {
    "peak": "peak",
    "reserved": "reserved",
    "forward_end": "end of forward",
    "backward_begin": "begin of backward",
    "optimizer": "optimizer",
    "begin": "between",
    "late_peak": "late peak",
    "late_reserved": "late reserved",
}
CALLS = {
    "event_records": "records",
    "event_waits": "waits",
    "event_creates": "new events",
    "launches": "launches",
    "operators": "operators",
    "collectives": "collectives",
    "pointer_queries": "pointers",
    "synchronizations": "host waits",
    "mallocs": "cudaMalloc",
}


def planned_peak(row: Row, name: str) -> int:
    """Return the peak that the plan of a row has, in bytes."""

    def make(_batch: int, length: int) -> tuple[torch.nn.Module, Inputs]:
        model = make_model(row.size, recomputes=False, lora=row.lora)
        if row.tensor_parallel > 1:
            share_matrices(model, init_device_mesh("cpu", (row.tensor_parallel,)))
        tokens = torch.zeros(length, dtype=torch.long, device="meta")
        return model, Inputs((tokens,))

    by_rows = name == FSDP_C_FULLY
    settings = Settings(
        optimizer="none" if row.offloads else "adamw",
        recomputes=row.recomputes,
        num_batches=1 if row.accumulation is None else 2,
        accumulation=(
            _native.SYNC_NONE if row.accumulation == UNSYNC else _native.SYNC_REDUCE
        ),
    )
    sharding = Sharding(
        param_dtype=PARAM_DTYPE,
        reduce_dtype=REDUCE_DTYPE,
        use_orig_params=True,
        cpu_offload=row.offloads,
        fully_shard=by_rows,
    )
    source = ModelSource(row.title, make, batch=1, sequence=row.num_tokens)
    num_shards = row.num_ranks // row.tensor_parallel
    if row.tensor_parallel > 1 and not dist.is_initialized():
        join_fake_group(row.tensor_parallel)
    plan = plan_model(
        source, [num_shards], sharding=sharding, settings=settings, wrap="Block"
    )
    return plan.ranks[0].peak_nbytes


def fake_environment() -> Mapping[str, str]:
    """Return the variables of a process on the fake CUDA, whose peers do not exist."""
    sys.path.insert(0, str(ROOT / "tests"))
    from fakecuda.__main__ import environment
    from fakecuda.build import build

    found = environment(build())
    paths = (found["PYTHONPATH"], str(ROOT / "tests"))
    return {**found, "PYTHONPATH": os.pathsep.join(paths), "FAKE_CUDA_NOOP": "alone"}


def measure(args: argparse.Namespace) -> Json:
    """Train all rows by all implementations and return the results."""
    keys = args.only or list(ROWS)
    names = list(dict.fromkeys((BARE, *(args.implementations or IMPLEMENTATIONS))))
    jobs = {
        f"{key}: {name}": [
            *(str(WORKER), "--worker", name, "--row", key),
            *("--steps", str(args.steps)),
        ]
        for key in keys
        for name in names
        # The FSDP1 API shards no parameters that are shared already.
        if ROWS[key].tensor_parallel == 1 or name in (BARE, FSDP2, FSDP_C_FULLY)
    }
    runs = run_interleaved(
        jobs, num_rounds=args.rounds, num_ranks=1, environ=fake_environment()
    )
    results: list[Json] = []
    failed = []
    for key in keys:
        for name in names:
            its_runs = runs.get(f"{key}: {name}")
            if its_runs is None:
                continue
            if "failed" in its_runs[0]:
                failed.append(f"{key}, {LABELS[name]}: {its_runs[0]['failed']}")
                continue
            result = {**its_runs[0], **timed_row(its_runs)}
            results.append({"row": key, "implementation": name, **result})
            if name in OURS:
                results[-1]["planned"] = planned_peak(ROWS[key], name)
    return results_of("device", args, results=results, notices=failed)


def label(row: Json) -> str:
    """Return the name of a row's implementation."""
    whole = LABELS[row["implementation"]]
    return whole if row["implementation"] in OURS else whole.partition(",")[0]


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f}"


def render_memory(rows: list[Json], *, markdown: bool) -> str:
    """Return what is held in a row of the page, in MiB."""
    torchs = [row["held"] for row in rows if row["implementation"] in TORCHS]
    cells = []
    for row in rows:
        held = row["held"]
        fits = held["reserved"] <= DEVICE_NBYTES
        line = [label(row)]
        line += [_mib(held[name]) if fits else "-" for name in HELD]
        planned = row.get("planned")
        line.append(_mib(planned) if planned else "-")
        line.append(f"{held['peak'] / planned:.3f}" if planned else "-")
        is_ours = row["implementation"] in OURS and torchs
        for name in ("peak", "late_peak"):
            least = min((other[name] for other in torchs), default=0)
            line.append(f"{held[name] / least:.3f}" if is_ours else "-")
        cells.append(line)
    headers = ["MiB", *HELD.values(), "planned", "to planned", "to torch's"]
    headers.append("late to torch's")
    return format_table(headers, cells, markdown=markdown)


def render_calls(rows: list[Json], num_units: int, *, markdown: bool) -> str:
    """Return what a row of the page calls in a step, and the host's time."""
    bare = next(row for row in rows if row["implementation"] == BARE)
    sharded = [row for row in rows if row is not bare]

    def called(row: Json, name: str) -> int:
        return int(row["calls"][name] - bare["calls"][name])

    def added(row: Json) -> float:
        return float(row["step_ms"] - bare["step_ms"]) * 1e3 / num_units

    # What nobody calls is left out.
    names = [name for name in CALLS if any(called(row, name) for row in sharded)]
    ours = {row["implementation"]: added(row) for row in sharded}
    cells = []
    for row in sharded:
        line = [label(row)]
        for name in names:
            value = called(row, name)
            line.append(f"{value:,} ({value / num_units:.1f})" if value else "0")
        line += [*timed_cells(row, 1), f"{added(row):.0f}"]
        line.append(ratio(added(row), ours.get(FSDP_C_ORIG)))
        cells.append(line)
    headers = ["a step", *(CALLS[name] for name in names), "ms", *TIMED_HEADERS]
    headers += ["added per unit (us)", "to fsdp_c"]
    return format_table(headers, cells, markdown=markdown)


def render_all(data: Json, *, heading: str, markdown: bool) -> str:
    """Return the tables of all rows, each below its heading."""
    sections = []
    for key in dict.fromkeys(result["row"] for result in data["results"]):
        row = ROWS[key]
        results = [result for result in data["results"] if result["row"] == key]
        bare_ms = next(r["step_ms"] for r in results if r["implementation"] == BARE)
        sections += [
            f"{heading}{row.describe()}",
            f"{row.size.describe()}. The bare model's step takes {bare_ms:.1f} ms.",
            render_memory(results, markdown=markdown),
        ]
        if len(results) > 1:
            sections.append(render_calls(results, row.num_units, markdown=markdown))
    return "\n\n".join(sections)


def merged(runs: list[Json]) -> Json:
    """Return the results of several runs of this benchmark as those of one."""
    by_row = {
        (result["row"], result["implementation"]): result
        for run in runs
        for result in run["results"]
    }
    order = list(ROWS)
    results = sorted(by_row.values(), key=lambda result: order.index(result["row"]))
    return {
        **runs[0],
        "command": "\n    ".join(dict.fromkeys(run["command"] for run in runs)),
        "notices": [notice for run in runs for notice in run["notices"]],
        "results": results,
    }


def page(data: Json) -> str:
    """Return the page."""
    return TEXT.format(
        command=data["command"],
        machine=environment_line(data["environment"]),
        rounds=data["settings"]["rounds"],
        steps=data["settings"]["steps"],
        sections=render_all(data, heading="## ", markdown=True),
        notices="".join(f"\n\n{notice}." for notice in data["notices"]),
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--steps", type=positive_int, default=10, help="timed steps per process")
    add("--rounds", type=positive_int, default=3, help="processes per figure")
    add("--only", nargs="+", choices=list(ROWS), help="rows (default: all)")
    add(
        "--implementations",
        nargs="+",
        choices=[name for name in IMPLEMENTATIONS if name != BARE],
        help="beside the bare model (default: all)",
    )
    add(
        "--json",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="read these instead of running: rows may come from several runs",
    )
    add("--save-json", type=Path, metavar="FILE", help="keep the results here")
    add(
        "--out",
        type=Path,
        help="the page (default: docs/measurements/device.md, if all ran)",
    )
    return parser


def main() -> int:
    """Measure; print the tables, or write the page."""
    args = parser().parse_args()
    if args.json is not None:
        data = merged([json.loads(path.read_text()) for path in args.json])
    elif torch.version.cuda is None:
        print(
            f"error: torch {torch.__version__} was built without CUDA, and this "
            "benchmark runs torch's CUDA code: `make cuda-test` makes an environment",
            file=sys.stderr,
        )
        return 2
    else:
        data = measure(args)
    if args.save_json is not None:
        write_json(args.save_json, data)
    is_whole = args.only is None and args.implementations is None
    out = args.out
    if out is None and is_whole:
        out = ROOT / "docs" / "measurements" / "device.md"
    if out is None:
        print(environment_line(data["environment"]))
        print(render_all(data, heading="\n", markdown=False))
        print("\n".join(data["notices"]))
        return 0
    out.write_text(page(data))
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
