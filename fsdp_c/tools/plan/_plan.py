"""One rank's plan: the engine of training, run over a port that only counts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp_c import _native
from fsdp_c._units.config import _PREFETCHES, RESHARDING
from fsdp_c._units.keep_whole import block_numels, check_padding
from fsdp_c.tools.plan._errors import PlanError
from fsdp_c.tools.plan._events import StepEvents
from fsdp_c.tools.plan._explain import _chosen
from fsdp_c.tools.plan._trace import StepTrace
from fsdp_c.tools.plan._units import PlacedUnit, PlannedUnit, SegmentDtypes, groups_of
from fsdp_c.tools.plan._whole import (
    Chooser,
    WholeStep,
    is_hidden_matrix,
    plan_whole_step,
)

# Name: (states of a parameter's shape, whether there is a step of 4 bytes).
OPTIMIZERS = {
    "adamw": (2, True),
    "adam": (2, True),
    "adagrad": (1, True),
    "rmsprop": (1, True),
    "sgd-momentum": (1, False),
    "sgd": (0, False),
    "none": (0, False),
    # Of what it does not step: a whole_parameter_optimizer with AdamW for the rest.
    "muon": (2, True),
}
_STEPS_WHOLES = "muon"
_STEP_NBYTES = 4  # torch keeps an optimizer's step as one fp32 element
_BITS = 8


@dataclass(frozen=True)
class Link:
    """What carries a group's collectives, as seen by one rank.

    Attributes:
        gbps: 1e9 bits per second, in each direction.
        latency_us: Microseconds of one hop; a collective of R ranks has
            ceil(log2(R)).
    """

    gbps: float = 400.0
    latency_us: float = 10.0

    def in_seconds(self) -> tuple[float, float]:
        """Return (bytes per second, seconds of latency)."""
        return self.gbps * 1e9 / _BITS, self.latency_us * 1e-6


@dataclass(frozen=True)
class Settings:
    """What does not depend on the model.

    Attributes:
        link: Of the sharding group.
        replica_link: Of the replicas.
        ranks_per_host: Of the sharding group, whose collectives go by hosts; 0: all
            ranks share a host, or ``link`` is that of the slowest hop.
        host_link: Of a host, which its ranks share.
        tflops: 1e12 operations per second that a device achieves.
        optimizer: A key of OPTIMIZERS.
        steps_whole: With muon: of a parameter, by name and unsharded shape, whether
            Muon steps it; AdamW has the others. None: matrices whose names have no
            embed, head, wte or wpe.
        on_cpu: Train on the CPU; else on an accelerator, which aligns large units.
        recomputes: Every unit but the root and those inside others is recomputed in
            backward (activation checkpointing inside the unit).
        num_batches: Micro-batches of a step.
        accumulation: What all but the last do, one of ``_native.SYNC_...``.
        wants_scratch: Reductions go through gloo, not shared memory or NCCL.
        rank: Whose optimizer state is counted; with use_orig_params it depends on
            the rank. The first one holds the most, but with muon.
        by_rows: Units are those of fully_shard().
        offload_keep_last: As in :func:`fsdp_c.offload_activations`; 0: it was not
            called, or the device is a CPU.
        offload_min_bytes: Likewise.
        copy_gbps: 1e9 bits per second between the device and host memory, in each
            direction.
    """

    link: Link = Link()
    replica_link: Link = Link()
    ranks_per_host: int = 0
    host_link: Link = Link()
    tflops: float = 400.0
    optimizer: str = "adamw"
    steps_whole: Chooser | None = None
    on_cpu: bool = False
    recomputes: bool = False
    num_batches: int = 1
    accumulation: int = _native.SYNC_REDUCE
    wants_scratch: bool = False
    rank: int = 0
    by_rows: bool = False
    offload_keep_last: int = 0
    offload_min_bytes: int = 1 << 20
    copy_gbps: float = 200.0


@dataclass(frozen=True)
class Collective:
    """All calls of one kind in a step, on one rank.

    Attributes:
        launches: Groups of calls: one for each unit.
        calls: One for each segment of a unit.
        payload_nbytes: Of the whole buffers, padding included.
        wire_nbytes: Bytes that a rank of a ring sends; it receives as many.
        seconds: Time for which they keep the link busy.
    """

    launches: int
    calls: int
    payload_nbytes: int
    wire_nbytes: int
    seconds: float


@dataclass(frozen=True)
class UnitPlan:
    """One unit's bytes on a rank.

    Attributes:
        name: Of its module; empty for the root.
        kind: The module's class.
        shard_ranks: Ranks that its parameters are sharded over.
        numel: Elements of its parameters.
        shard_nbytes: Of this rank's shards, padding included.
        unsharded_nbytes: Of its whole parameters in forward, padding included.
        grad_nbytes: Of its whole gradients in reduce dtype, padding included.
        exposed_seconds: That the device waits for its parameters in a step.
    """

    name: str
    kind: str
    shard_ranks: int
    numel: int
    shard_nbytes: int
    unsharded_nbytes: int
    grad_nbytes: int
    exposed_seconds: float


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds, sends and waits for. All in bytes and seconds.

    Attributes:
        world_size: All ranks.
        shard_ranks: Ranks of the root's sharding group.
        replicas: How many such groups there are.
        shard_nbytes: Parameters: this rank's shards.
        grad_shard_nbytes: Their gradients, when backward is over.
        optimizer_nbytes: The optimizer's state.
        arena_nbytes: Blocks for unsharded parameters and gradients: the most that
            are there at once.
        peak_block_nbytes: Blocks, scratch and partial sums at the busiest moment.
        scratch_nbytes: What reductions through gloo need beside them.
        partial_grad_nbytes: Sums that accumulation keeps sharded.
        buffer_nbytes: The model's buffers, which are not sharded.
        pending_grad_nbytes: Of autograd's gradients at the busiest moment.
        activation_nbytes: An estimate, at the busiest moment: tensors of a forward and
            a backward on meta, from their creation to their end, with attention as a
            fused kernel. None: not known.
        peak_nbytes: Device memory at the busiest moment of a step. Gradients and
            activations count as far as they are there then.
        host_nbytes: In host memory, with CPU offload or offloaded activations.
        pinned_nbytes: Of it, chunks for offloaded activations.
        offloaded_nbytes: Most of the activations that are there at once.
        step_allocs: Blocks that a step takes from the device's allocator.
        all_gather, reduce_scatter, all_reduce: The collectives of a step.
        compute_seconds: An estimate: operations over ``tflops``.
        exposed_seconds: An estimate: waits for collectives.
        step_seconds: Their sum.
        units: In the engine's order, the root first.
        whole: The step of parameters that are stepped whole; None: there are none.
    """

    world_size: int
    shard_ranks: int
    replicas: int
    shard_nbytes: int
    grad_shard_nbytes: int
    optimizer_nbytes: int
    arena_nbytes: int
    peak_block_nbytes: int
    scratch_nbytes: int
    partial_grad_nbytes: int
    buffer_nbytes: int
    pending_grad_nbytes: int
    activation_nbytes: int | None
    peak_nbytes: int
    host_nbytes: int
    pinned_nbytes: int
    offloaded_nbytes: int
    step_allocs: int
    all_gather: Collective
    reduce_scatter: Collective
    all_reduce: Collective
    compute_seconds: float
    exposed_seconds: float
    step_seconds: float
    units: tuple[UnitPlan, ...]
    whole: WholeStep | None = None


def plan_rank(
    units: Sequence[PlannedUnit],
    trace: StepTrace,
    settings: Settings,
    world_size: int,
    mesh: tuple[int, int] | None = None,
    buffer_nbytes: int = 0,
) -> RankPlan:
    """Return what one of ``world_size`` ranks needs for a training step.

    The engine of csrc/core runs three steps over a port that allocates nothing and
    counts; the last one is reported. So the layouts, the order of the collectives
    and the blocks are those of training; times come from a model
    (csrc/core/plan/counting_port.h).

    ``units`` and ``trace`` are of one model, with buffers of ``buffer_nbytes``. For the
    hybrid strategies ``mesh`` is (replicas, shards).

    Raises:
        PlanError: A number is out of its bounds, or a size does not fit in int64.
    """
    placed = [_place(unit, settings, world_size, mesh) for unit in units]
    run = StepEvents(
        units,
        trace,
        flops_per_second=settings.tflops * 1e12,
        offload_min_bytes=settings.offload_min_bytes,
    )
    try:
        report: dict[str, Any] = _native.plan_step(
            [_native_unit(each, settings) for each in placed],
            run.forward,
            run.backward,
            settings.link.in_seconds(),
            settings.replica_link.in_seconds(),
            num_batches=settings.num_batches,
            accumulation=settings.accumulation,
            wants_scratch=settings.wants_scratch,
            is_host=settings.on_cpu,
            hosts=(settings.ranks_per_host, *settings.host_link.in_seconds()),
            offload=(
                0 if settings.on_cpu else settings.offload_keep_last,
                settings.copy_gbps * 1e9 / _BITS,
            ),
        )
    except (ValueError, OverflowError, RuntimeError) as error:
        raise PlanError(f"{world_size} ranks: {error}") from error
    trained = _trained(units, run.trained, settings)
    whole, left_out = None, frozenset[str]()
    if settings.optimizer == _STEPS_WHOLES:
        whole, left_out = plan_whole_step(
            placed,
            settings.steps_whole or is_hidden_matrix,
            trained=trained,
            by_rows=settings.by_rows,
            on_cpu=settings.on_cpu,
            rank=settings.rank,
        )
    optimizer = [_optimizer_nbytes(u, settings, trained - left_out) for u in placed]
    unit_plans = tuple(map(_unit_plan, placed, report["unit_exposed_seconds"]))
    on_host = sum(
        plan.shard_nbytes + state
        for plan, state, unit in zip(unit_plans, optimizer, placed, strict=True)
        if unit.offloads
    )
    state, peak = sum(optimizer), report["peak"]
    in_step = held_on_host = 0
    if whole is not None:
        state += whole.state_nbytes
        if all(unit.offloads for unit in placed):
            on_host += whole.state_nbytes
            held_on_host = whole.held_nbytes
        else:
            in_step = report["grad_shard_nbytes"] + whole.held_nbytes
        whole = replace(whole, is_peak=in_step > peak["nbytes"])
    at_rest = report["shard_nbytes"] + state + buffer_nbytes - on_host
    return RankPlan(
        world_size=world_size,
        shard_ranks=placed[0].layout.world_size,
        replicas=placed[0].replicas,
        shard_nbytes=report["shard_nbytes"],
        grad_shard_nbytes=report["grad_shard_nbytes"],
        optimizer_nbytes=state,
        arena_nbytes=report["first_steps_peak_nbytes"],
        peak_block_nbytes=peak["blocks"],
        scratch_nbytes=report["scratch_nbytes"],
        partial_grad_nbytes=report["partial_grad_nbytes"],
        buffer_nbytes=buffer_nbytes,
        pending_grad_nbytes=peak["pending_grads"],
        activation_nbytes=None if trace.no_forward else peak["activations"],
        peak_nbytes=at_rest + max(peak["nbytes"], in_step),
        host_nbytes=on_host + held_on_host + peak["host"],
        pinned_nbytes=report["pinned_nbytes"],
        offloaded_nbytes=report["offloaded_nbytes"],
        step_allocs=report["num_step_allocs"],
        all_gather=_collective(report["all_gather"]),
        reduce_scatter=_collective(report["reduce_scatter"]),
        all_reduce=_collective(report["all_reduce"]),
        compute_seconds=report["compute_seconds"],
        exposed_seconds=report["exposed_seconds"],
        step_seconds=report["step_seconds"],
        units=unit_plans,
        whole=whole,
    )


def _collective(count: dict[str, Any]) -> Collective:
    return Collective(
        launches=count["num_launches"],
        calls=count["num_calls"],
        payload_nbytes=count["payload_nbytes"],
        wire_nbytes=count["wire_nbytes"],
        seconds=count["seconds"],
    )


# What training decides in the bridge ------------------------------------------


def _place(
    unit: PlannedUnit, settings: Settings, world_size: int, mesh: tuple[int, int] | None
) -> PlacedUnit:
    shard_ranks, replicas = groups_of(unit.config, world_size, mesh)
    kept = [p.kept for p in unit.params]
    blocks = None if settings.by_rows else block_numels(kept, shard_ranks)
    try:
        layout = unit.config.make_layout(
            [(p.numel, p.dtype, p.requires_grad) for p in unit.params],
            shard_ranks,
            is_cpu=settings.on_cpu,
            row_numels=[p.row_numel for p in unit.params] if settings.by_rows else None,
            block_numels=blocks,
        )
        if blocks is not None:
            check_padding([(p.name, p.numel, p.kept) for p in unit.params], layout)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise PlanError(f"unit {unit.name or unit.kind!r}: {error}") from error
    # Whether shards are elsewhere than the device (csrc/torch/unit.cpp).
    offloads = unit.config.cpu_offload.offload_params and not settings.on_cpu
    dtypes = [_dtypes(master, unit, settings) for master, *_ in layout.segments]
    return PlacedUnit(unit, layout, dtypes, replicas, offloads)


def _dtypes(
    master: torch.dtype, unit: PlannedUnit, settings: Settings
) -> SegmentDtypes:
    """Return the dtypes of a segment (csrc/torch/unit.cpp)."""
    precision = unit.config.mixed_precision
    param = _chosen(master, precision.param_dtype)
    reduce = _chosen(param, precision.reduce_dtype)
    held = reduce if settings.by_rows else param
    return SegmentDtypes(
        param, reduce, held, param if precision.keep_low_precision_grads else master
    )


def _native_unit(placed: PlacedUnit, settings: Settings) -> tuple[Any, ...]:
    unit, config = placed.unit, placed.unit.config
    return (
        unit.name or unit.kind,
        placed.layout,
        placed.dtypes,
        placed.replicas,
        config.sharding_strategy in RESHARDING,
        settings.by_rows,
        settings.by_rows,
        unit.main is not None,
        _PREFETCHES[config.backward_prefetch],
        config.forward_prefetch,
        placed.offloads,
    )


def _unit_plan(placed: PlacedUnit, exposed_seconds: float) -> UnitPlan:
    unit, layout = placed.unit, placed.layout
    shard = unsharded = grads = 0
    for (master, is_trainable, _, _, shard_numel, padded_numel), dtypes in zip(
        layout.segments, placed.dtypes, strict=True
    ):
        shard += shard_numel * master.itemsize
        unsharded += padded_numel * dtypes.param.itemsize
        grads += padded_numel * dtypes.reduce.itemsize if is_trainable else 0
    return UnitPlan(
        name=unit.name,
        kind=unit.kind,
        shard_ranks=layout.world_size,
        numel=unit.numel,
        shard_nbytes=shard,
        unsharded_nbytes=unsharded,
        grad_nbytes=grads,
        exposed_seconds=exposed_seconds,
    )


def _trained(
    units: Sequence[PlannedUnit], used: Collection[str], settings: Settings
) -> frozenset[str]:
    """Return the names of the parameters that get gradients.

    FullyShardedDataParallel reduces a unit as a whole: what backward does not reach
    gets zeros.
    """
    return frozenset(
        param.name
        for unit in units
        for param in unit.params
        if param.requires_grad
        and (
            param.name in used
            or (not settings.by_rows and any(p.name in used for p in unit.params))
        )
    )


def _optimizer_nbytes(
    placed: PlacedUnit, settings: Settings, stepped: frozenset[str]
) -> int:
    """Return the bytes of torch's optimizer over what the unit shows to it.

    ``stepped`` are the names of the parameters that it steps.
    """
    unit, layout = placed.unit, placed.layout
    num_states, has_step = OPTIMIZERS[settings.optimizer]
    step = _STEP_NBYTES if has_step else 0
    total = 0
    if not any(param.name in stepped for param in unit.params):
        return 0
    if not unit.config.use_orig_params:
        for master, is_trainable, _, _, shard_numel, _ in layout.segments:
            if is_trainable and shard_numel > 0:
                total += num_states * shard_numel * master.itemsize + step
        return total
    rank = settings.rank % layout.world_size
    for index, param in enumerate(unit.params):
        begin, end, _, _ = layout.intersect(index, rank)
        if param.name not in stepped:
            continue
        # fully_shard() shows every rank all parameters.
        if end > begin or settings.by_rows:
            total += num_states * (end - begin) * param.dtype.itemsize + step
    return total
