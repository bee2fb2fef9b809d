"""A model's plan for one or many world sizes, and the wrapping to suggest."""

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_c._units.groups import HYBRID
from fsdp_c.tools.plan._errors import PlanError
from fsdp_c.tools.plan._events import recomputed_units
from fsdp_c.tools.plan._models import ModelSource
from fsdp_c.tools.plan._plan import RankPlan, Settings, plan_rank
from fsdp_c.tools.plan._recorder import trace_step
from fsdp_c.tools.plan._trace import StepTrace
from fsdp_c.tools.plan._units import (
    PlannedUnit,
    find_units,
    with_apart,
    without_warnings,
)
from fsdp_c.tools.plan._wrapping import AUTO, Wrapping, wrappings

MAX_RANKS = 1_000_000
# Candidates that differ from the best by at most this fraction count as equal.
_WORTH = 0.01
_TIMES = (
    "Times are estimates: operations over --tflops, collectives over the link, copies "
    "to the host over --copy-gbps; casts, the optimizer and the host are not counted."
)

_ACTIVATIONS = (
    "Activations are those of a forward and a backward on meta, from the creation of "
    "each tensor to its end, with the loss and with attention as a fused kernel; "
    "temporary memory inside kernels, the allocator's gaps and the CUDA context are "
    "not in it."
)


@dataclass(frozen=True)
class Sharding:
    """Arguments of FullyShardedDataParallel, or with ``fully_shard`` of that.

    fully_shard() has no strategies: there ``strategy`` says whether units reshard after
    forward, and whether the mesh has replicas.
    """

    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    use_orig_params: bool = False
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    cpu_offload: bool = False
    fully_shard: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return them by name."""
        return {
            "sharding_strategy": self.strategy,
            "mixed_precision": MixedPrecision(
                param_dtype=self.param_dtype,
                reduce_dtype=self.reduce_dtype,
                keep_low_precision_grads=self.keep_low_precision_grads,
            ),
            "use_orig_params": self.use_orig_params or self.fully_shard,
            "backward_prefetch": self.backward_prefetch,
            "forward_prefetch": self.forward_prefetch,
            "cpu_offload": CPUOffload(offload_params=self.cpu_offload),
        }


_SHARDING = Sharding()
_SETTINGS = Settings()


@dataclass(frozen=True)
class Suggestion:
    """One way to wrap the model, compared with the others at one world size."""

    wrap: str
    code: str
    why: str
    num_units: int
    peak_nbytes: int
    step_seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class ModelPlan:
    """What ``python -m fsdp_c plan`` prints.

    Attributes:
        model: As the user named it.
        kind: The model's class.
        numel: Elements of its parameters, shared ones once.
        trainable_numel: Those of them that need a gradient.
        num_tokens: Of one forward of one rank.
        flops: Of one forward of one rank.
        wrap, code, why: Which modules are units, and why these.
        ranks: One rank's plan for each world size.
        suggestions: The ways to wrap it, the one to use first.
        notes: What is not known or estimated, in sentences.
    """

    model: str
    kind: str
    numel: int
    trainable_numel: int
    num_tokens: int
    flops: int
    wrap: str
    code: str
    why: str
    ranks: tuple[RankPlan, ...]
    suggestions: tuple[Suggestion, ...] = ()
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        return asdict(self)


def plan_model(
    source: ModelSource,
    world_sizes: Sequence[int],
    *,
    sharding: Sharding = _SHARDING,
    settings: Settings = _SETTINGS,
    mesh: tuple[int, int] | None = None,
    wrap: str = AUTO,
    memory_nbytes: int | None = None,
) -> ModelPlan:
    """Plan the training of a model, on meta, without a process group.

    Args:
        source: From :func:`fsdp_c.tools.plan.find_model`.
        world_sizes: Numbers of ranks, each in [1, 1,000,000]; of a model whose
            parameters are DTensors, those that shard what a rank has of them.
        sharding: Arguments of FullyShardedDataParallel.
        settings: Links, device, optimizer.
        mesh: (replicas, shards) for the hybrid strategies; its product must be every
            world size. With several world sizes replicas follow from the shards.
        wrap: ``auto``, ``none``, ``size:NUMEL`` or class names with commas between.
        memory_nbytes: Of one device: what does not fit is not suggested.

    Raises:
        PlanError: Something of it cannot be planned; the message says what to change.

    Example:
        >>> source = find_model("my_package.models:make_gpt")  # doctest: +SKIP
        >>> plan = plan_model(source, [8, 64, 512])  # doctest: +SKIP
        >>> plan.ranks[0].shard_nbytes  # doctest: +SKIP
        1610612736
    """
    if not world_sizes:
        raise PlanError("--world-size: no number of ranks was given")
    if sharding.fully_shard:
        _check_fully_shard(sharding)
        settings = replace(settings, by_rows=True)
    meshes = [_mesh_of(size, sharding.strategy, mesh) for size in world_sizes]
    if mesh is not None and len(world_sizes) == 1:
        _check_whole(world_sizes[0], mesh)
    model, _ = source.build()
    if settings.optimizer == "muon":
        _check_whole_matrices(model)
    options = wrappings(wrap, model)
    chosen = options[0]
    buffers = sum(buffer.nbytes for buffer in model.buffers())

    @functools.cache
    def trace_of(recomputed: tuple[str, ...]) -> StepTrace:
        traced, inputs = source.build()
        return trace_step(
            traced,
            inputs,
            source.batch * source.sequence,
            param_dtype=sharding.param_dtype,
            recomputed=recomputed,
        )

    @functools.cache
    def wrapped(wrapping: Wrapping) -> tuple[list[PlannedUnit], StepTrace]:
        units = _units_of(source, wrapping, sharding)
        return units, trace_of(recomputed_units(units) if settings.recomputes else ())

    @functools.cache
    def plan(wrapping: Wrapping, size: int, at: tuple[int, int] | None) -> RankPlan:
        return plan_rank(*wrapped(wrapping), settings, size, at, buffers)

    params = list(model.parameters())
    suggestions = [(each, plan(each, world_sizes[0], meshes[0])) for each in options]
    _, trace = wrapped(chosen)
    return ModelPlan(
        model=source.name,
        kind=type(model).__name__,
        numel=sum(param.numel() for param in params),
        trainable_numel=sum(param.numel() for param in params if param.requires_grad),
        num_tokens=trace.num_tokens,
        flops=trace.flops,
        wrap=chosen.text,
        code=chosen.calls if sharding.fully_shard else chosen.code,
        why=chosen.why,
        ranks=tuple(
            plan(chosen, size, at) for size, at in zip(world_sizes, meshes, strict=True)
        ),
        suggestions=_sorted(suggestions, memory_nbytes, by_calls=sharding.fully_shard),
        notes=_notes(trace),
    )


def _units_of(
    source: ModelSource, wrapping: Wrapping, sharding: Sharding
) -> list[PlannedUnit]:
    model, _ = source.build()
    arguments = sharding.arguments()
    arguments["auto_wrap_policy"] = wrapping.policy(model)
    try:
        with without_warnings():
            units = find_units(model, arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"wrapping {wrapping.text!r}: {error}") from error
    return with_apart(units) if sharding.fully_shard else units


def _mesh_of(
    world_size: int, strategy: ShardingStrategy, mesh: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Check one world size; return its (replicas, shards)."""
    if not 1 <= world_size <= MAX_RANKS:
        raise PlanError(
            f"--world-size {world_size}: need a number of ranks from 1 to {MAX_RANKS:,}"
        )
    if strategy not in HYBRID:
        if mesh is not None:
            raise PlanError(
                f"--mesh {mesh[0]}x{mesh[1]} is for HYBRID_SHARD and --strategy is "
                f"{strategy.name}: leave it out, or choose HYBRID_SHARD"
            )
        return None
    if mesh is None:
        raise PlanError(
            f"--strategy {strategy.name} needs --mesh REPLICASxSHARDS, such as "
            f"--mesh {max(1, world_size // 8)}x{min(8, world_size)}: without it, "
            "training shards over the ranks of a node, which a plan does not know"
        )
    replicas, shards = mesh
    if min(mesh) < 1 or world_size % shards != 0:
        raise PlanError(
            f"--mesh {replicas}x{shards} does not divide {world_size} ranks: the ranks "
            "that shard (the second number) must divide the world size"
        )
    return world_size // shards, shards


def _check_whole(world_size: int, mesh: tuple[int, int]) -> None:
    if mesh[0] * mesh[1] != world_size:
        raise PlanError(
            f"--mesh {mesh[0]}x{mesh[1]} has {mesh[0] * mesh[1]} ranks and "
            f"--world-size is {world_size}: make them equal, for example --mesh "
            f"{world_size // mesh[1]}x{mesh[1]}"
        )


def _check_whole_matrices(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if is_traceable_wrapper_subclass(param):
            raise PlanError(
                f"--optimizer muon: {name!r} is a {type(param.data).__name__}, and the "
                "owners of tensor parallel matrices are not planned: choose another "
                "optimizer"
            )


def _check_fully_shard(sharding: Sharding) -> None:
    wrong = {
        "--strategy NO_SHARD": sharding.strategy is ShardingStrategy.NO_SHARD,
        "--keep-low-precision-grads": sharding.keep_low_precision_grads,
        "--backward-prefetch": sharding.backward_prefetch
        is not BackwardPrefetch.BACKWARD_PRE,
    }
    for name, is_given in wrong.items():
        if is_given:
            raise PlanError(
                f"{name} belongs to FullyShardedDataParallel, and fully_shard() has "
                "nothing like it: leave it out, or leave --fully-shard out"
            )


def _sorted(
    plans: Sequence[tuple[Wrapping, RankPlan]],
    memory_nbytes: int | None,
    *,
    by_calls: bool,
) -> tuple[Suggestion, ...]:
    """Order the candidates.

    With a limit: what fits, then the fastest. Without one: the smallest. What
    differs by at most 1 % from the best counts as equal; then the other measure
    decides.
    """
    fastest = min(plan.step_seconds for _, plan in plans)
    smallest = min(plan.peak_nbytes for _, plan in plans)

    def key(item: tuple[Wrapping, RankPlan]) -> tuple[bool, float, float]:
        plan = item[1]
        if memory_nbytes is not None and plan.peak_nbytes <= memory_nbytes:
            is_slow = plan.step_seconds > (1 + _WORTH) * fastest
            return (False, plan.step_seconds if is_slow else 0, plan.peak_nbytes)
        is_large = plan.peak_nbytes > (1 + _WORTH) * smallest
        return (True, plan.peak_nbytes if is_large else 0, plan.step_seconds)

    return tuple(
        Suggestion(
            wrap=wrapping.text,
            code=wrapping.calls if by_calls else wrapping.code,
            why=wrapping.why,
            num_units=len(plan.units),
            peak_nbytes=plan.peak_nbytes,
            step_seconds=plan.step_seconds,
            exposed_seconds=plan.exposed_seconds,
        )
        for wrapping, plan in sorted(plans, key=key)
    )


def _notes(trace: StepTrace) -> tuple[str, ...]:
    if trace.no_forward:
        return (
            f"Activations are not known: {trace.no_forward}. The units' order is that "
            "of the module tree, and each element of a matrix counts 2 operations per "
            "token.",
            _TIMES,
        )
    if trace.no_backward:
        return (
            "Activations are an estimate: what a forward on meta leaves behind. Its "
            f"backward {trace.no_backward}, so gradients of activations and "
            "recomputation are not in it.",
            _TIMES,
        )
    return (_ACTIVATIONS, _TIMES)
