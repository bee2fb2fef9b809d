"""The command line: python -m fsdp_c bench."""

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fsdp_c._text import finite_float, positive_int
from fsdp_c.tools.bench._implementations import IMPLEMENTATIONS, OURS
from fsdp_c.tools.bench._processes import BenchError, run_ranks
from fsdp_c.tools.bench._report import differences, save_picture, table
from fsdp_c.tools.bench._workload import Workload

# What is trained if nothing is said; a GPU that is kept waiting measures the host.
_DEFAULTS = {
    "cuda": {"width": 2048, "layers": 16, "batch": 4, "length": 1024},
    "cpu": {"width": 256, "layers": 6, "batch": 2, "length": 64},
}
_TRACE_SECONDS = 1.0
# Beyond the time to train: imports, communicators, first steps.
_START_TIMEOUT_S = 300.0


def _seconds(text: str) -> float:
    return finite_float(text, "seconds > 0", lambda value: value > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_c bench",
        description="Train one transformer with fsdp_c, torch's FSDP1, FSDP2 and DDP, "
        "interleaved, on the GPUs of this machine or on its CPU; write a table, a "
        "picture and a timeline.",
    )
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], help="default: GPUs if there are any")
    add("--ranks", type=positive_int, help="processes (default: all GPUs; 2 on a CPU)")
    for name, what in (
        ("width", "width of the transformer"),
        ("layers", "layers of the transformer, each a unit"),
        ("batch", "sequences per rank"),
        ("length", "tokens of a sequence"),
    ):
        kinds = ", ".join(f"{_DEFAULTS[each][name]} on {each}" for each in _DEFAULTS)
        add(f"--{name}", type=positive_int, help=f"{what} (default: {kinds})")
    add("--vocabulary", type=positive_int, default=4096, help="tokens (default: 4096)")
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="dtype of forward, backward and reductions (default: bfloat16 on GPUs, "
        "float32 on a CPU)",
    )
    add("--checkpoint", action="store_true", help="checkpoint activations per layer")
    add(
        "--seconds",
        type=_seconds,
        default=60.0,
        help="seconds to train each implementation, over all rounds (default: 60)",
    )
    add(
        "--rounds",
        type=positive_int,
        default=3,
        help="processes per figure (default: 3)",
    )
    add(
        "--only",
        nargs="+",
        choices=IMPLEMENTATIONS,
        metavar="NAME",
        help=f"implementations: {', '.join(IMPLEMENTATIONS)} (default: all)",
    )
    add(
        "--out",
        type=Path,
        default=Path("fsdp_c-bench"),
        help="output folder (default: %(default)s)",
    )
    return parser


def _workload(words: argparse.Namespace) -> Workload:
    """Return what to measure.

    Raises:
        ValueError: This machine cannot; the message says why.
    """
    num_gpus = torch.cuda.device_count()
    device = words.device or ("cuda" if num_gpus else "cpu")
    if device == "cuda":
        if num_gpus == 0:
            raise ValueError(
                f"--device cuda: torch {torch.__version__} finds no GPU "
                "(`python -m fsdp_c doctor` says what it sees)"
            )
        if words.ranks is not None and words.ranks > num_gpus:
            raise ValueError(
                f"--ranks {words.ranks}: there are {num_gpus} GPUs, one per rank"
            )
    size = {
        name: getattr(words, name) or value for name, value in _DEFAULTS[device].items()
    }
    if size["width"] > 64 and size["width"] % 64 != 0:
        raise ValueError(f"--width {size['width']}: expected a multiple of 64")
    return Workload(
        device=device,
        num_ranks=words.ranks or num_gpus or 2,
        width=size["width"],
        num_layers=size["layers"],
        vocabulary=words.vocabulary,
        batch=size["batch"],
        length=size["length"],
        dtype=words.dtype or ("bfloat16" if device == "cuda" else "float32"),
        recomputes=words.checkpoint,
        seconds=words.seconds / words.rounds,
    )


def machine(device: str) -> dict[str, Any]:
    """Return what the figures depend on."""
    cpu = platform.processor() or "unknown CPU"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line for line in lines if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
        nccl: Any = torch.cuda.nccl
        found["nccl"] = ".".join(map(str, nccl.version()))
    return found


def _run(
    name: str, workload: Workload, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run one implementation once; return what its first rank reports."""
    return run_ranks(
        ["-m", "fsdp_c.tools.bench._worker", name, workload.to_json()],
        workload.num_ranks,
        timeout_s=_START_TIMEOUT_S + 10 * workload.seconds,
        environ=environ,
    )


def _measure(
    workload: Workload, names: Sequence[str], num_rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Run all implementations in each round, every second one backwards."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(num_rounds):
        for name in names[:: 1 if number % 2 == 0 else -1]:
            result = _run(name, workload)
            results[name].append(result)
            print(
                f"round {number + 1} of {num_rounds}: {name}: "
                f"{result['step_ms']:.2f} ms (median of {result['num_steps']} steps)",
                flush=True,
            )
    return results


def _trace(workload: Workload, folder: Path) -> None:
    """Record three steps of fsdp_c; draw them and merge the ranks."""
    short = replace(workload, seconds=_TRACE_SECONDS)
    _run(OURS, short, {"FSDP_C_TRACE": str(folder)})
    for command in ("merge", "show"):
        words = [sys.executable, "-m", "fsdp_c", "trace", command, str(folder)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def main(words: Sequence[str]) -> int:
    """Run the command ``words``; return the exit status.

    0: done. 1: a measurement failed, or implementations trained differently. 2: wrong
    words.
    """
    parsed = _parser().parse_args(words)
    try:
        workload = _workload(parsed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    names = parsed.only or list(IMPLEMENTATIONS)
    folder: Path = parsed.out
    found = machine(workload.device)
    command = shlex.join(["python", "-m", "fsdp_c", "bench", *words])
    heading = (
        f"{workload.describe()}\n\n"
        f"{', '.join(f'{key} {value}' for key, value in found.items())}\n\n"
        f"    {command}\n"
    )
    print(heading, flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results = _measure(workload, names, parsed.rounds)
        text = table(workload, results)
        (folder / "bench.md").write_text(f"{heading}\n{text}\n")
        data = {
            "command": command,
            "machine": found,
            "workload": asdict(workload),
            "results": results,
        }
        (folder / "bench.json").write_text(json.dumps(data, indent=2) + "\n")
        print(f"\n{text}\n")
        try:
            save_picture(workload, results, folder / "bench.png")
            if OURS in names:
                _trace(workload, folder / "timeline")
        except ImportError as error:
            print(f"no pictures: {error}: pip install matplotlib", file=sys.stderr)
    except (BenchError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: {', '.join(sorted(each.name for each in folder.iterdir()))}")
    wrong = differences(workload, results)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0
