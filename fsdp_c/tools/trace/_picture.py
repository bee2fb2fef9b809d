"""One step as a picture: a row per lane, a group of rows per rank."""

import os
from collections.abc import Sequence
from typing import Any

from fsdp_c.tools.trace._clocks import align
from fsdp_c.tools.trace._data import TraceError
from fsdp_c.tools.trace._lanes import Lanes, Step

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
    "hit": "#2d7f2d",
    "miss": "#a02020",
}
MARKERS = {"hit": "^", "miss": "v"}
# A stretch shorter than this part of the step has no name in it.
LABEL_SHARE = 0.035
MAX_RANKS = 4


def draw(
    all_lanes: Sequence[Lanes],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
) -> None:
    """Draw one step of up to four ranks; by default the last one.

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
    axes[-1].set_xlabel(f"ms since the start of step {step}")
    _legend(figure, [lanes for lanes, _ in shown])
    figure.savefig(path, dpi=130)


def _legend(figure: Any, shown: Sequence[Lanes]) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    names = {
        "forward": "forward",
        "recompute": "recomputation",
        "backward": "backward",
        "unshard": "unshard in flight",
        "reduce": "reduction in flight",
        "replicate": "all_reduce in flight",
        "wait": "exposed communication",
        "host": "other calls of fsdp_c",
        "arena": "arena, bytes held",
    }
    used = {"wait", "host", "arena"}
    for lanes in shown:
        used |= {each.what for each in lanes.compute}
        used |= {each.lane for each in lanes.collectives if each.end > each.begin}
    handles: list[Any] = [
        Patch(color=COLORS[key], label=name)
        for key, name in names.items()
        if key in used
    ]
    for key, name in (("hit", "prefetch hit"), ("miss", "prefetch miss")):
        handles.append(
            Line2D([], [], color=COLORS[key], marker=MARKERS[key], ls="", label=name)
        )
    figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False)


def _draw_rank(axis: Any, lanes: Lanes, index: int, shift: int) -> None:
    step = lanes.steps[index]
    rows = ["replicate", "reduce", "unshard", "fsdp_c", "compute"]
    if not any(each.lane == "replicate" for each in lanes.collectives):
        rows.remove("replicate")
    place = {name: row for row, name in enumerate(rows)}

    def bars(row: int, items: list[tuple[int, int, str]], **more: Any) -> None:
        inside = [
            (max(begin, step.begin), min(end, step.end), color)
            for begin, end, color in items
            if end > step.begin and begin < step.end
        ]
        more.setdefault("linewidth", 0)
        axis.broken_barh(
            [((b + shift) / 1e6, (e - b) / 1e6) for b, e, _ in inside],
            (row - 0.4, 0.8),
            facecolors=[COLORS[color] for *_, color in inside],
            **more,
        )

    bars(place["compute"], [(s.begin, s.end, s.what) for s in lanes.compute])
    bars(place["fsdp_c"], [(s.begin, s.end, "host") for s in lanes.calls])
    waits = [(s.begin, s.end, "wait") for s in lanes.exposed]
    bars(place["compute" if lanes.on_device else "fsdp_c"], waits)
    for lane in rows:
        flights = [
            (each.begin, each.end, lane)
            for each in lanes.collectives
            if each.lane == lane and each.end > each.begin
        ]
        if flights:  # each with an edge: they follow one another closely
            bars(place[lane], flights, linewidth=0.8, edgecolor="white")
    _label_units(axis, lanes, step, shift, place)
    _draw_uses(axis, lanes, step, shift, place["compute"])
    _draw_arena(axis, lanes, step, shift, len(rows))
    axis.set_yticks([*place.values(), len(rows)], [*place, "arena"])
    axis.set_ylim(-0.6, len(rows) + 0.6)
    axis.set_title(f"rank {lanes.recorded.rank}", loc="left", fontsize="small")
    axis.spines[["top", "right"]].set_visible(False)


def _label_units(
    axis: Any, lanes: Lanes, step: Step, shift: int, place: dict[str, int]
) -> None:
    """Name the units of stretches that are long enough for a word."""
    items = [(place["compute"], s.begin, s.end, s.unit) for s in lanes.compute]
    items += [
        (place[each.lane], each.begin, each.end, each.unit)
        for each in lanes.collectives
        if each.end > each.begin
    ]
    for row, begin, end, unit in items:
        is_inside = begin >= step.begin and end <= step.end
        if not is_inside or end - begin < LABEL_SHARE * (step.end - step.begin):
            continue
        axis.text(
            ((begin + end) / 2 + shift) / 1e6,
            row,
            ".".join(lanes.recorded.label(unit).split(".")[-2:]),
            ha="center",
            va="center",
            color="white",
            fontsize=6,
            clip_on=True,
        )


def _draw_uses(axis: Any, lanes: Lanes, step: Step, shift: int, row: int) -> None:
    """Mark where a unit's parameters were needed."""
    for key, is_hit in (("hit", True), ("miss", False)):
        times = [
            (use.time + shift) / 1e6
            for use in lanes.uses
            if use.is_hit == is_hit and step.begin <= use.time < step.end
        ]
        axis.plot(
            times,
            [row + 0.48] * len(times),
            color=COLORS[key],
            marker=MARKERS[key],
            markersize=4,
            linestyle="",
        )


def _draw_arena(axis: Any, lanes: Lanes, step: Step, shift: int, row: int) -> None:
    points = [
        (time, nbytes)
        for time, nbytes in lanes.recorded.arena
        if step.begin <= time <= step.end
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
        (step.begin + shift) / 1e6,
        row,
        f"{peak / 2**20:.1f} MiB ",
        ha="right",
        fontsize=6,
    )
