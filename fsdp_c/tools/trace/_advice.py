"""Advice: only what follows from what was recorded.

Each rule looks at the numbers and at the settings of the units, and gives a sentence
with the number that it follows from, or nothing.
"""

from collections.abc import Callable, Sequence

from fsdp_c.tools.trace._data import Recorded, UnitInfo
from fsdp_c.tools.trace._numbers import Numbers

# Below this part of a step a wait is not worth a setting.
WORTH = 0.03
# A gather of fewer bytes costs its calls more than its bytes.
SMALL_NBYTES = 1 << 20

Rule = Callable[[Numbers, Sequence[UnitInfo]], str | None]


def _ms(time: float) -> str:
    return f"{time / 1e6:.2f} ms"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"


def _sharded(units: Sequence[UnitInfo]) -> list[UnitInfo]:
    return [unit for unit in units if len(unit.shard_ranks) > 1]


def _late_rank(numbers: Numbers, units: Sequence[UnitInfo]) -> str | None:
    if numbers.share(numbers.skew) < WORTH or not numbers.late_ranks:
        return None
    rank, time = max(numbers.late_ranks.items(), key=lambda item: item[1])
    return (
        f"Ranks are out of step: {_ms(numbers.skew)} per step are waits for late "
        f"ranks, most of it ({_ms(time)}) for rank {rank}. No FSDP setting changes "
        "that: check what else that rank does (data loading, other work on its "
        "processor)."
    )


def _forward_prefetch(numbers: Numbers, units: Sequence[UnitInfo]) -> str | None:
    phase = numbers.phases["forward"]
    if numbers.share(phase.miss_wait - numbers.skew) < WORTH:
        return None  # little, or for a late rank
    if all(unit.forward_prefetch for unit in _sharded(units)):
        return None
    return (
        f"forward_prefetch=True: in forward {phase.misses} unshards began only when "
        f"their unit was reached, and {_ms(phase.miss_wait)} per step "
        f"({_percent(numbers.share(phase.miss_wait))}) were spent waiting for them."
    )


def _backward_prefetch(numbers: Numbers, units: Sequence[UnitInfo]) -> str | None:
    phase = numbers.phases["backward"]
    if numbers.share(phase.miss_wait + phase.late_wait - numbers.skew) < WORTH:
        return None
    others = {u.backward_prefetch for u in _sharded(units)} - {"BACKWARD_PRE"}
    if not others:
        return None
    now = " and ".join(sorted(other or "None" for other in others))
    return (
        f"backward_prefetch=BackwardPrefetch.BACKWARD_PRE (it is {now}): in backward "
        f"{_ms(phase.miss_wait + phase.late_wait)} per step "
        f"({_percent(numbers.share(phase.miss_wait + phase.late_wait))}) were spent "
        "waiting for unshards that began too late."
    )


def _larger_units(numbers: Numbers, units: Sequence[UnitInfo]) -> str | None:
    sharded = _sharded(units)
    if len(sharded) < 3 or numbers.num_gathers == 0:
        return None
    mean_nbytes = numbers.gathered_nbytes / numbers.num_gathers
    cost = numbers.host + numbers.exposed
    if mean_nbytes >= SMALL_NBYTES or numbers.share(cost) < 0.2:
        return None
    return (
        f"Larger units: the {len(sharded)} units are gathered in pieces of "
        f"{mean_nbytes / 1024:.0f} KiB on average, and fsdp_c's own work and its waits "
        f"are {_percent(numbers.share(cost))} of a step. Wrap several layers together "
        "(a policy of a higher class, or of a larger min_num_params)."
    )


def _keep_after_forward(numbers: Numbers, units: Sequence[UnitInfo]) -> str | None:
    resharding = [
        u for u in _sharded(units) if u.strategy in ("FULL_SHARD", "HYBRID_SHARD")
    ]
    saved = numbers.backward_wait
    if len(resharding) < 2 or numbers.share(saved) < WORTH:
        return None
    if numbers.share(numbers.skew) >= numbers.share(saved):
        return None
    nbytes = sum(unit.unsharded_nbytes for unit in resharding)
    return (
        "ShardingStrategy.SHARD_GRAD_OP (or _HYBRID_SHARD_ZERO2), if memory allows: it "
        f"keeps the parameters from forward to backward, which saves "
        f"{numbers.backward_gathers:.0f} all-gathers and {_ms(saved)} "
        f"({_percent(numbers.share(saved))}) of waiting per step, and holds up to "
        f"{nbytes / 2**20:.1f} MiB of unsharded parameters (in the shards' dtype)."
    )


def _reductions(numbers: Numbers, units: Sequence[UnitInfo]) -> str | None:
    if numbers.share(numbers.reduce_wait) < WORTH:
        return None
    if numbers.skew >= 0.5 * (numbers.reduce_wait + numbers.unshard_wait):
        return None
    name, unit = max(numbers.units.items(), key=lambda item: item[1].reduce_wait)
    text = (
        f"Waiting for reductions takes {_ms(numbers.reduce_wait)} per step "
        f"({_percent(numbers.share(numbers.reduce_wait))}), most for unit {name} "
        f"({_ms(unit.reduce_wait)}). With gradient accumulation, no_sync() "
        "reduces less often."
    )
    if any("float32" in each.reduce_dtypes for each in units):
        text += (
            " MixedPrecision(reduce_dtype=torch.bfloat16) halves the bytes of fp32 "
            "gradients, and rounds them."
        )
    return text


def _unused(numbers: Numbers, units: Sequence[UnitInfo]) -> str | None:
    if numbers.num_unused == 0 or not numbers.num_steps:
        return None
    return (
        f"{numbers.num_unused} prefetches were dropped unused: the order of the units "
        "changes from step to step, or a forward ends early. Turn forward_prefetch off "
        "if it is on."
    )


RULES: tuple[Rule, ...] = (
    _late_rank,
    _forward_prefetch,
    _backward_prefetch,
    _keep_after_forward,
    _reductions,
    _larger_units,
    _unused,
)


def advice(numbers: Numbers, recorded: Recorded) -> list[str]:
    """Return sentences on what to try, the most useful first; may be empty."""
    found = [rule(numbers, recorded.units) for rule in RULES]
    return [sentence for sentence in found if sentence is not None]
