"""What was measured, as a table and as a picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_c.tools.bench._workload import Workload

Rounds = Mapping[str, Sequence[Mapping[str, Any]]]  # by implementation

_MIB = 2**20
# The first losses may differ by so much of their value. The first step has equal
# weights; the next ones follow gradients that were rounded in another order.
_FIRST_TOLERANCE = 5e-3
_TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}


def smallest(rounds: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the smallest value over the rounds."""
    return min(float(each[key]) for each in rounds)


def table(workload: Workload, results: Rounds) -> str:
    """Return a markdown table; a figure is the smallest of its rounds' medians."""
    tokens = workload.num_ranks * workload.batch * workload.length
    first = smallest(next(iter(results.values())), "step_ms")
    rows = []
    for name, rounds in results.items():
        step_ms = smallest(rounds, "step_ms")
        row = {
            "": name,
            "step (ms)": f"{step_ms:.2f}",
            "to the first": f"{step_ms / first:.2f}x",
            "slowest round (ms)": f"{max(float(r['step_ms']) for r in rounds):.2f}",
            "tokens per second": f"{tokens / step_ms * 1e3:,.0f}",
        }
        if workload.device == "cuda":
            row["host (ms)"] = f"{smallest(rounds, 'host_ms'):.2f}"
        row["peak (MiB)"] = f"{smallest(rounds, 'peak_nbytes') / _MIB:,.0f}"
        rows.append(row)
    headers = list(rows[0])
    lines = [headers, ["---"] + ["--:"] * (len(headers) - 1)]
    lines += [list(row.values()) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def differences(workload: Workload, results: Rounds) -> list[str]:
    """Say at which of the first steps losses differ: something trained wrongly."""
    tolerance = _TOLERANCES[workload.dtype]
    found = []
    for step, losses in enumerate(
        zip(*(rounds[0]["losses"] for rounds in results.values()), strict=True)
    ):
        limit = tolerance if step else min(tolerance, _FIRST_TOLERANCE)
        largest = max(map(abs, losses))
        if (
            not all(map(math.isfinite, losses))
            or max(losses) - min(losses) > limit * largest
        ):
            each = ", ".join(
                f"{name} {loss:.5f}" for name, loss in zip(results, losses, strict=True)
            )
            found.append(f"the losses of step {step} differ: {each}")
    return found


def save_picture(workload: Workload, results: Rounds, path: Path) -> None:
    """Draw step time and peak memory as bars.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    figure = Figure(figsize=(10, 1.2 + 0.4 * len(results)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = list(results)[::-1]
    for axes, key, unit, label in (
        (panels[0], "step_ms", 1.0, "a training step (ms)"),
        (panels[1], "peak_nbytes", _MIB, "peak memory of rank 0 (MiB)"),
    ):
        values = [smallest(results[name], key) / unit for name in names]
        colors = ["C0" if name.startswith("fsdp_c") else "0.7" for name in names]
        bars = axes.barh(names, values, color=colors)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize="small")
        axes.margins(x=0.15)
        axes.set_xlabel(label)
    figure.suptitle(workload.describe(), fontsize="small")
    figure.savefig(path, dpi=120)
