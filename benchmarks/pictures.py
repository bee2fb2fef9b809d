"""The pictures of the page of benchmarks: host, memory, step over size."""

from __future__ import annotations

from pathlib import Path

import host_overhead
import memory
import train_step
from common import Json
from implementations import (
    BARE,
    DDP,
    FSDP1_ORIG,
    FSDP2,
    FSDP_C,
    FSDP_C_FULLY,
    FSDP_C_ORIG,
    LABELS,
)
from matplotlib.figure import Figure

OURS_COLOR = "#c44e52"
COLORS = {
    FSDP_C_ORIG: OURS_COLOR,
    FSDP_C_FULLY: "#dd8452",
    FSDP1_ORIG: "#8c9bb0",
    FSDP2: "#4c72b0",
    DDP: "#55a868",
}
DPI = 120


def draw_host(counts: Json, path: Path) -> None:
    """Draw the instructions that each implementation adds as bars."""
    added = {
        row["implementation"]: row["added_per_unit"] / 1e3
        for row in counts["results"]
        if row["implementation"] != BARE
    }
    figure = Figure(figsize=(10, 2.4), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([LABELS[name] for name in added], list(added.values()))
    for bar, name in zip(bars, added, strict=True):
        bar.set_color(OURS_COLOR if name in FSDP_C else COLORS[FSDP1_ORIG])
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(
        "Instructions of the host, added per unit and step "
        f"(fake group of {host_overhead.WORLD_SIZE})",
        fontsize=9,
    )
    axes.set_xlabel("thousands, less is better")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=DPI)


def draw_memory(peaks: Json, path: Path) -> None:
    """Draw the peaks on 2 ranks over gloo, one group of bars per scenario."""
    names = (FSDP_C_ORIG, FSDP_C_FULLY, FSDP1_ORIG, FSDP2)
    scenarios: dict[str, dict[str, float]] = {}
    for row in peaks["results"]:
        if row["num_ranks"] != 2 or row["transport"] != memory.GLOO:
            continue
        if "measured" not in row or row["implementation"] not in names:
            continue
        title = memory.title(peaks, f"{row['scenario']}-2").removesuffix(", 2 ranks")
        peak = row["measured"]["total"] / memory.MIB
        # The first of several rows of an implementation trains as the others do.
        scenarios.setdefault(title, {}).setdefault(row["implementation"], peak)
    figure = Figure(figsize=(10, 0.6 + 0.75 * len(scenarios)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [
            place + (index - 1.5) * height
            for place, found in enumerate(scenarios.values())
            if name in found
        ]
        values = [found[name] for found in scenarios.values() if name in found]
        bars = axes.barh(places, values, height, color=COLORS[name], label=LABELS[name])
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=7)
    axes.set_yticks(range(len(scenarios)), [_wrapped(title) for title in scenarios])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("peak of a rank of 2 (MiB), less is better")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=7, loc="outside upper right", ncols=len(names))
    figure.savefig(path, dpi=DPI)


def _wrapped(title: str) -> str:
    return title.replace(", ", ",\n", 1)


def draw_over_size(step: Json, path: Path) -> None:
    """Draw a step's time over the bare model's, against the number of parameters."""
    found = train_step.over_size(step)
    bare = {million: row["step_ms"] for million, row in found.pop(BARE).items()}
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, rows in found.items():
        ratios = [row["step_ms"] / bare[million] for million, row in rows.items()]
        axes.plot(list(rows), ratios, "o-", color=COLORS[name], label=LABELS[name])
    axes.axhline(1.0, color="0.8", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks(list(bare), [f"{million:.0f} M" for million in bare], minor=False)
    axes.minorticks_off()
    axes.set_xlabel(f"parameters ({train_step.NUM_RANKS} ranks, gloo group)")
    axes.set_ylabel("step / bare model")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=DPI)
