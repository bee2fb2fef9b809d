"""A plan as a picture: memory and time over the number of ranks."""

from pathlib import Path
from typing import Any

from fsdp_c.tools.plan._model_plan import ModelPlan
from fsdp_c.tools.plan._table import bars_text, parts_at_peak

_GIB = 2**30
_MS = 1e3


def save_picture(plan: ModelPlan, path: Path) -> Path:
    """Draw ``plan`` to ``path``; return where it is.

    Without matplotlib it is text, in a file of that name that ends with ``.txt``.

    Raises:
        OSError: The file cannot be written.
        ValueError: matplotlib does not know the file's suffix.
    """
    if path.suffix != ".txt":
        try:
            from matplotlib.figure import Figure  # noqa: PLC0415 - optional
        except ImportError:
            path = path.with_suffix(".txt")
        else:
            _draw(plan, Figure(figsize=(10, 4), layout="constrained")).savefig(path)
            return path
    path.write_text(bars_text(plan.ranks), "utf-8")
    return path


def _draw(plan: ModelPlan, figure: Any) -> Any:
    memory, time = figure.subplots(1, 2)
    places = range(len(plan.ranks))
    labels = [f"{each.world_size:,}" for each in plan.ranks]

    bottoms = [0.0] * len(plan.ranks)
    parts = [parts_at_peak(each) for each in plan.ranks]
    for name in parts[0]:
        heights = [part[name] / _GIB for part in parts]
        if any(heights):
            memory.bar(places, heights, bottom=bottoms, label=name)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    memory.set_ylabel("GiB of one rank, at the busiest moment")

    compute = [each.compute_seconds * _MS for each in plan.ranks]
    exposed = [each.exposed_seconds * _MS for each in plan.ranks]
    time.bar(places, compute, label="compute (estimate)")
    time.bar(places, exposed, bottom=compute, label="exposed communication (estimate)")
    time.set_ylabel("ms of a step")
    for axes in (memory, time):
        axes.set_xticks(list(places), labels, rotation=45, ha="right")
        axes.set_xlabel("ranks")
        axes.legend(fontsize="small")
    figure.suptitle(f"{plan.kind}: {plan.numel:,} parameters, {plan.wrap}")
    return figure
