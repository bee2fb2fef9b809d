"""One step as a picture: a row per lane, a group of rows per rank."""

import os
from collections.abc import Sequence
from typing import Any

from fsdp_c.trace._clocks import align
from fsdp_c.trace._data import TraceError
from fsdp_c.trace._lanes import Lanes

COLORS = {
    "forward": "#4c78a8",
    "backward": "#2f4b6e",
    "recompute": "#72b7b2",
    "unshard": "#54a24b",
    "reduce": "#f58518",
    "replicate": "#b279a2",
    "wait": "#e45756",
    "host": "#9d9d9d",
    "arena": "#bab0ac",
}
MAX_RANKS = 4


def draw(
    all_lanes: Sequence[Lanes],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
) -> None:
    """Draw one step of up to four ranks; by default the last but the first.

    Raises:
        ImportError: matplotlib is not installed.
        TraceError: There is no such step.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            "the picture needs matplotlib: pip install matplotlib"
        ) from error
    num_steps = min(len(lanes.steps) for lanes in all_lanes)
    if num_steps == 0:
        raise TraceError("no step was recorded: there is nothing to draw")
    if step is None:
        step = num_steps - 1
    if not 0 <= step < num_steps:
        raise TraceError(
            f"step {step} was not recorded, there are 0 to {num_steps - 1}"
        )
    shown = list(zip(all_lanes, align(all_lanes), strict=True))[:MAX_RANKS]
    origin = min(lanes.steps[step].begin + clock.offset for lanes, clock in shown)
    figure = Figure(figsize=(13, 1.2 + 1.9 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (lanes, clock) in zip(axes, shown, strict=True):
        _draw_rank(axis, lanes, step, clock.offset - origin)
    axes[-1].set_xlabel(f"ms since the begin of step {step}")
    _legend(figure)
    figure.savefig(path, dpi=130)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415

    names = {
        "forward": "forward",
        "recompute": "recomputation",
        "backward": "backward",
        "unshard": "unshard in flight",
        "reduce": "reduction in flight",
        "replicate": "all_reduce in flight",
        "wait": "waiting for communication",
        "host": "calls of fsdp_c",
        "arena": "arena, bytes held",
    }
    patches = [Patch(color=COLORS[key], label=name) for key, name in names.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=5, frameon=False)


def _draw_rank(axis: Any, lanes: Lanes, index: int, shift: int) -> None:
    step = lanes.steps[index]

    def bars(row: int, items: list[tuple[int, int, str]], height: float) -> None:
        inside = [
            (max(begin, step.begin), min(end, step.end), color)
            for begin, end, color in items
            if end > step.begin and begin < step.end
        ]
        axis.broken_barh(
            [((b + shift) / 1e6, (e - b) / 1e6) for b, e, _ in inside],
            (row - height / 2, height),
            facecolors=[COLORS[color] for *_, color in inside],
            linewidth=0,
        )

    rows = ["replicate", "reduce", "unshard", "fsdp_c", "compute"]
    if not any(each.lane == "replicate" for each in lanes.collectives):
        rows.remove("replicate")
    place = {name: row for row, name in enumerate(rows)}
    bars(place["compute"], [(s.begin, s.end, s.what) for s in lanes.compute], 0.8)
    bars(place["fsdp_c"], [(s.begin, s.end, "host") for s in lanes.calls], 0.8)
    waits = [(s.begin, s.end, "wait") for s in lanes.exposed]
    bars(place["compute" if lanes.on_device else "fsdp_c"], waits, 0.8)
    for lane in rows:
        flights = [
            (each.begin, each.end, lane)
            for each in lanes.collectives
            if each.lane == lane and each.end > each.begin
        ]
        if flights:
            bars(place[lane], flights, 0.8)
    _draw_arena(axis, lanes, step.begin, step.end, shift, len(rows))
    axis.set_yticks([*place.values(), len(rows)], [*place, "arena"])
    axis.set_ylim(-0.6, len(rows) + 0.6)
    axis.set_title(f"rank {lanes.recorded.rank}", loc="left", fontsize="small")
    axis.spines[["top", "right"]].set_visible(False)


def _draw_arena(
    axis: Any, lanes: Lanes, begin: int, end: int, shift: int, row: int
) -> None:
    points = [
        (s.end, s.nbytes)
        for s in sorted(lanes.recorded.spans, key=lambda s: s.end)
        if s.sequence < 0 and s.nbytes >= 0 and begin <= s.end <= end
    ]
    peak = max((nbytes for _, nbytes in points), default=0)
    if peak == 0:
        return
    axis.fill_between(
        [(time + shift) / 1e6 for time, _ in points],
        row - 0.4,
        [row - 0.4 + 0.8 * nbytes / peak for _, nbytes in points],
        step="post",
        color=COLORS["arena"],
        linewidth=0,
    )
    axis.text(
        (begin + shift) / 1e6, row, f"{peak / 2**20:.1f} MiB ", ha="right", fontsize=6
    )
