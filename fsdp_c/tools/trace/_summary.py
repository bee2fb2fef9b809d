"""A trace in words."""

from collections.abc import Sequence

from fsdp_c._text import table
from fsdp_c.tools.trace._advice import advice
from fsdp_c.tools.trace._clocks import align, describe
from fsdp_c.tools.trace._lanes import Lanes
from fsdp_c.tools.trace._numbers import Numbers, PhaseNumbers, numbers_of

_WHOLES = {
    "gather_wholes": "whole parameters, to their owners",
    "step_wholes": "whole parameters, steps of owners",
    "scatter_wholes": "whole parameters, back home",
}
# Units that are listed one by one.
MAX_UNITS = 8


def summary(all_lanes: Sequence[Lanes]) -> str:
    """Return what a reader should know of these ranks' steps."""
    numbers = numbers_of(all_lanes)
    first = all_lanes[0].recorded
    lines = [_head(numbers, all_lanes)]
    if numbers.num_steps == 0:
        lines.append("No step was recorded: the wrapped module's forward did not run.")
        return "\n".join(lines) + "\n"
    lines += ["", *_where(numbers, all_lanes), "", *_prefetches(numbers)]
    lines += ["", *_units(numbers), "", *_notes(numbers, all_lanes)]
    sentences = advice(numbers, first)
    if sentences:
        lines += ["", "Advice:", *(f"  * {each}" for each in sentences)]
    else:
        lines += ["", _nothing(numbers, sees_device=_sees(all_lanes))]
    return "\n".join(lines) + "\n"


def _sees(all_lanes: Sequence[Lanes]) -> bool:
    """Whether waits of the compute lane are known: of the host, or of a device."""
    return all(e.on_device or e.recorded.device == "cpu" for e in all_lanes)


def _head(numbers: Numbers, all_lanes: Sequence[Lanes]) -> str:
    recorded = all_lanes[0].recorded
    ranks = f"{numbers.num_ranks} of {recorded.world_size} ranks"
    carried = f", carried by {recorded.transport}" if recorded.transport else ""
    return (
        f"{numbers.num_steps} steps, {ranks}, {len(recorded.units)} units, on "
        f"{recorded.device}{carried}. Means per step and rank:"
    )


def _where(numbers: Numbers, all_lanes: Sequence[Lanes]) -> list[str]:
    rows = [("step", numbers.step), ("compute of the units", numbers.compute)]
    if _sees(all_lanes):
        rows += [
            ("exposed communication", numbers.exposed),
            ("  waiting for unshards", numbers.unshard_wait),
            ("  waiting for reductions", numbers.reduce_wait),
        ]
        if numbers.starts_block:
            rows.append(("  starting collectives (data moves there)", numbers.start))
    if not numbers.starts_block:
        rows.append(("host, starting collectives", numbers.start))
    rows.append(("host, other fsdp_c work", numbers.host))
    if numbers.clip > 0:
        rows.append(("clip_grad_norm_", numbers.clip))
    rows.append(("outside forward and backward (optimizer, data)", numbers.rest))
    rows += [(f"  {_WHOLES[kind]}", time) for kind, time in numbers.wholes.items()]
    return [
        f"  {name:<46}{time / 1e6:>10.3f} ms {numbers.share(time):>7.1%}"
        for name, time in rows
    ]


def _phase(name: str, phase: PhaseNumbers) -> str:
    rate = phase.hit_rate
    if rate is None:
        return f"  {name:<9} no all-gathers"
    text = f"  {name:<9} {phase.hits} hits, {phase.misses} misses ({rate:.0%} hits)"
    if phase.late:
        text += f"; {phase.late} of the hits were late"
    return text


def _prefetches(numbers: Numbers) -> list[str]:
    lines = ["Prefetches, of all steps and ranks:"]
    lines += [_phase(name, phase) for name, phase in numbers.phases.items()]
    if numbers.num_unused:
        lines.append(f"  {numbers.num_unused} were dropped unused")
    return lines


def _units(numbers: Numbers) -> list[str]:
    ordered = sorted(numbers.units.items(), key=lambda item: -item[1].waited)
    name, unit = ordered[0]
    lines = []
    if unit.waited > 0:
        lines.append(
            f"Unit {name} waits longest: {unit.waited / 1e6:.3f} ms per step "
            f"(unshards {unit.unshard_wait / 1e6:.3f}, reductions "
            f"{unit.reduce_wait / 1e6:.3f})."
        )
    rows = [["unit (ms per step)", "unshard", "reduce", "start", "host", "compute"]]
    for each, its in ordered[:MAX_UNITS]:
        times = its.unshard_wait, its.reduce_wait, its.start, its.host, its.compute
        rows.append([each, *(f"{time / 1e6:.3f}" for time in times)])
    lines += [f"  {line}" for line in table(rows, num_text=1).splitlines()]
    if len(ordered) > MAX_UNITS:
        lines.append(f"  and {len(ordered) - MAX_UNITS} units that wait less")
    return lines


def _notes(numbers: Numbers, all_lanes: Sequence[Lanes]) -> list[str]:
    lines = [f"The arena held at most {numbers.arena_peak / 2**20:.2f} MiB on a rank."]
    if numbers.num_rounds:
        there, _, back = (numbers.whole_nbytes.get(kind, 0.0) for kind in _WHOLES)
        lines.append(
            f"Whole parameters: {numbers.num_rounds:.0f} rounds per step, "
            f"{there / 2**20:.2f} MiB to owners and {back / 2**20:.2f} MiB home, over "
            "all ranks."
        )
    if len(all_lanes) > 1:
        lines.append(describe(align(all_lanes)))
        lines.append(f"Waits for late ranks: {numbers.skew / 1e6:.3f} ms per step.")
    if not _sees(all_lanes):
        lines.append(
            "There are no device times: compute is the host's time in the units, and "
            "exposed communication is unknown."
        )
    if numbers.num_lost:
        lines.append(
            f"{numbers.num_lost} spans were overwritten, the oldest first: record "
            "fewer steps, or give record() a larger capacity."
        )
    return lines


def _nothing(numbers: Numbers, *, sees_device: bool) -> str:
    if not sees_device:
        return "No advice: it needs the device's times."
    return (
        f"No advice: {numbers.exposed / 1e6:.3f} ms per step "
        f"({numbers.share(numbers.exposed):.1%}) of communication is exposed, which no "
        "FSDP setting would reduce."
    )
