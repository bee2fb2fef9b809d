"""A plan as text: tables, and a picture in characters."""

from collections.abc import Iterable, Sequence

from fsdp_c._text import table
from fsdp_c.tools.plan._model_plan import ModelPlan, Suggestion
from fsdp_c.tools.plan._plan import Collective, RankPlan, UnitPlan

_PARTS = ("parameters", "gradients", "optimizer", "blocks", "activations", "other")
_MARKS = "PGOBAx"
_WIDTH = 60


def nbytes_text(nbytes: int) -> str:
    """Return bytes with a binary unit: ``1.50 GiB``."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{value:,.2f} {unit}"


def seconds_text(seconds: float) -> str:
    """Return a time with its unit: ``12.3 ms``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def parts_at_peak(plan: RankPlan) -> dict[str, int]:
    """Return peak device memory by purpose.

    ``gradients`` are the sharded ones that are there then, and autograd's that wait;
    ``other`` are scratch memory, partial sums and buffers, or a round of whole
    parameters and buffers.
    """
    activations = plan.activation_nbytes or 0
    offloads = plan.host_nbytes > plan.pinned_nbytes
    parameters = 0 if offloads else plan.shard_nbytes
    optimizer = 0 if offloads else plan.optimizer_nbytes
    blocks = min(plan.arena_nbytes, plan.peak_block_nbytes)
    other = plan.peak_block_nbytes - blocks + plan.buffer_nbytes
    if plan.whole is not None and plan.whole.is_peak:
        blocks = activations = 0
        other = plan.whole.held_nbytes + plan.buffer_nbytes
    rest = plan.peak_nbytes - parameters - optimizer - other - blocks - activations
    values = (parameters, rest, optimizer, blocks, activations, other)
    return dict(zip(_PARTS, values, strict=True))


def plan_text(plan: ModelPlan) -> str:
    """Return all of a plan as text, without the picture."""
    frozen = plan.numel - plan.trainable_numel
    first = plan.ranks[0]
    lines = [
        f"{plan.model}: {plan.kind}, {plan.numel:,} parameters"
        + (f", {frozen:,} of them frozen" if frozen else ""),
        f"units: {len(first.units)}, {plan.why}",
        f"one rank's forward: {plan.num_tokens:,} tokens, {plan.flops:.3g} operations",
        "",
        "Memory of one rank (* estimated)",
        _memory(plan.ranks),
        "",
        "Communication and time of one rank per step (* estimated)",
        _steps(plan.ranks),
        "",
        *_wholes(plan.ranks),
        f"Units, {first.world_size:,} ranks",
        _units(first.units),
    ]
    if len(plan.suggestions) > 1:
        lines += ["", *_advice(plan.suggestions, first.world_size)]
    return "\n".join([*lines, "", *plan.notes]) + "\n"


def _ranks_text(plan: RankPlan) -> str:
    mesh = f" ({plan.replicas}x{plan.shard_ranks})" if plan.replicas > 1 else ""
    return f"{plan.world_size:,}{mesh}"


def _memory(plans: Iterable[RankPlan]) -> str:
    header = "ranks parameters gradients optimizer blocks other activations* peak* host"
    rows = [
        (
            _ranks_text(plan),
            nbytes_text(plan.shard_nbytes),
            nbytes_text(plan.grad_shard_nbytes),
            nbytes_text(plan.optimizer_nbytes),
            nbytes_text(plan.arena_nbytes),
            nbytes_text(
                plan.scratch_nbytes + plan.partial_grad_nbytes + plan.buffer_nbytes
            ),
            "not known"
            if plan.activation_nbytes is None
            else nbytes_text(plan.activation_nbytes),
            nbytes_text(plan.peak_nbytes),
            nbytes_text(plan.host_nbytes),
        )
        for plan in plans
    ]
    return table([header.split(), *rows], num_text=0)


def _collective_text(count: Collective) -> str:
    return f"{count.launches} x, {nbytes_text(count.wire_nbytes)}"


def _steps(plans: Iterable[RankPlan]) -> str:
    header = "ranks all_gather reduce_scatter all_reduce compute* exposed* step*"
    rows = [
        (
            _ranks_text(plan),
            _collective_text(plan.all_gather),
            _collective_text(plan.reduce_scatter),
            _collective_text(plan.all_reduce),
            seconds_text(plan.compute_seconds),
            seconds_text(plan.exposed_seconds),
            seconds_text(plan.step_seconds),
            f"{plan.exposed_seconds / plan.step_seconds:.1%}"
            if plan.step_seconds > 0
            else "-",
        )
        for plan in plans
    ]
    return table([[*header.split(), "exposed share*"], *rows], num_text=0)


def _wholes(plans: Iterable[RankPlan]) -> list[str]:
    """Return the table of what is stepped whole, if something is."""
    rows = [
        (
            _ranks_text(plan),
            f"{plan.whole.num_params:,}",
            nbytes_text(plan.whole.state_nbytes),
            f"{plan.whole.num_rounds:,}",
            nbytes_text(plan.whole.held_nbytes),
            nbytes_text(plan.whole.wire_nbytes),
        )
        for plan in plans
        if plan.whole is not None
    ]
    if not rows:
        return []
    header = ("ranks", "owned", "state", "rounds", "memory of a round", "sent")
    title = "Matrices that the first rank steps whole, per step"
    return [title, table([header, *rows], num_text=0), ""]


def _units(units: Sequence[UnitPlan]) -> str:
    """Return a row for each run of equal units."""
    groups: list[list[UnitPlan]] = []
    for unit in units:
        if groups and _is_like(groups[-1][0], unit):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    header = ("unit", "class", "number", "numel", "shard", "unsharded", "exposed*")
    rows = [
        (
            _group_name(group),
            group[0].kind,
            str(len(group)),
            f"{group[0].numel:,}",
            nbytes_text(group[0].shard_nbytes),
            nbytes_text(group[0].unsharded_nbytes),
            seconds_text(sum(unit.exposed_seconds for unit in group)),
        )
        for group in groups
    ]
    return table([header, *rows], num_text=2)


def _is_like(one: UnitPlan, other: UnitPlan) -> bool:
    return (one.kind, one.numel, one.shard_nbytes, one.unsharded_nbytes) == (
        other.kind,
        other.numel,
        other.shard_nbytes,
        other.unsharded_nbytes,
    )


def _group_name(group: Sequence[UnitPlan]) -> str:
    first = group[0].name or "(root)"
    return first if len(group) == 1 else f"{first} ... {group[-1].name}"


def _advice(suggestions: Sequence[Suggestion], world_size: int) -> list[str]:
    best, *others = suggestions
    lines = [
        f"Suggested for {world_size:,} ranks: {best.code}",
        f"  {best.why}",
        f"  {best.num_units} units, {_outcome(best)}: {_merit(suggestions)}",
    ]
    lines += [
        f"  against {other.wrap}: {other.num_units} units, {_outcome(other)}"
        for other in others
    ]
    return lines


def _merit(suggestions: Sequence[Suggestion]) -> str:
    """Say what the first suggestion is best at; 1 % is not a difference."""
    best = suggestions[0]
    merits = []
    if best.peak_nbytes <= 1.01 * min(each.peak_nbytes for each in suggestions):
        merits.append("the smallest peak")
    if best.step_seconds <= 1.01 * min(each.step_seconds for each in suggestions):
        merits.append("the shortest step")
    return " and ".join(merits) or "the fastest that fits in --memory-gib"


def _outcome(suggestion: Suggestion) -> str:
    return (
        f"peak {nbytes_text(suggestion.peak_nbytes)}, step "
        f"{seconds_text(suggestion.step_seconds)}, including "
        f"{seconds_text(suggestion.exposed_seconds)} of exposed communication"
    )


def bars_text(plans: Sequence[RankPlan]) -> str:
    """Return device memory at the busiest moment as bars of characters."""
    largest = max(plan.peak_nbytes for plan in plans)
    width = max(len(_ranks_text(plan)) for plan in plans)
    lines = [
        "peak device memory of one rank by purpose: "
        + ", ".join(f"{mark} {part}" for mark, part in zip(_MARKS, _PARTS, strict=True))
    ]
    for plan in plans:
        bar, total, drawn = "", 0, 0
        for mark, nbytes in zip(_MARKS, parts_at_peak(plan).values(), strict=True):
            total += nbytes
            end = round(_WIDTH * total / max(1, largest))
            bar += mark * (end - drawn)
            drawn = max(drawn, end)
        lines.append(
            f"{_ranks_text(plan):>{width}} |{bar:<{_WIDTH}}| "
            f"{nbytes_text(plan.peak_nbytes)}"
        )
    return "\n".join(lines) + "\n"
