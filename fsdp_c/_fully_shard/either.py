"""Models of either API: their units and engines, for tools that take both."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fsdp_c import _native
from fsdp_c._engines.engine import ensure_engines
from fsdp_c._fully_shard.group import Group, group_of, groups_in
from fsdp_c._fully_shard.group import own_modules as modules_of
from fsdp_c._fully_shard.shared_engine import ensure_engine
from fsdp_c._units.base import ShardedModule, require_sharded, sharded_modules
from fsdp_c._units.names import clean_name
from fsdp_c._units.params import own_modules

# Of torch's ShardingStrategy: by whether there are replicas, and whether the unit
# reshards after forward.
_STRATEGIES = {
    (False, True): "FULL_SHARD",
    (False, False): "SHARD_GRAD_OP",
    (True, True): "HYBRID_SHARD",
    (True, False): "_HYBRID_SHARD_ZERO2",
}


@dataclass(frozen=True)
class UnitFacts:
    """One unit of a model, and how it was asked to run.

    Attributes:
        name: Of its module in the unwrapped model; empty for the root.
        strategy: Name of the ShardingStrategy that does the same.
        device: Where it computes.
        shard_group: The ranks that its parameters are sharded over; None for one.
        replica_group: The ranks that hold the same shard; None for one.
        segments: As ``_native.Unit.segments``.
        param_dtype, reduce_dtype, buffer_dtype: Asked for; None: the parameters' own.
        buffer_dtypes: Of its own buffers.
        forward_prefetch: Whether forward gathers ahead.
        backward_prefetch: Name of the BackwardPrefetch; empty for none.
    """

    name: str
    strategy: str
    device: torch.device
    shard_group: ProcessGroup | None
    replica_group: ProcessGroup | None
    segments: list[tuple[torch.dtype, bool, int, int, int, int]]
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    buffer_dtypes: tuple[torch.dtype, ...]
    forward_prefetch: bool
    backward_prefetch: str


def units_in(model: nn.Module) -> list[UnitFacts]:
    """Return the units in ``model``, parents first. Changes nothing.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: Nothing in it is sharded.
    """
    groups = _groups(model)
    return [
        *(_of_group(group, name) for group, name in groups.items()),
        *(
            _of_module(module, clean_name(f"{name}.")[:-1])
            for name, module in model.named_modules()
            if isinstance(module, ShardedModule)
        ),
    ]


def engines_in(model: nn.Module) -> list[_native.Engine]:
    """Return the engines of all units in ``model``, made if need be, parents first.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: Nothing in it is sharded.
    """
    engines = []
    for group in _groups(model):
        ensure_engine(group.modules[0])
        assert group.running is not None
        engines.append(group.running.engine)
    engines += ensure_engines(model)
    return list({id(engine): engine for engine in engines}.values())


def root_engine(module: nn.Module) -> _native.Engine | None:
    """Return the engine whose root ``module`` is; None if it is not one."""
    if isinstance(module, ShardedModule):
        return module._engine if module._is_root else None
    group = group_of(module)
    if group is None or group.running is None or not group.is_root:
        return None
    return group.running.engine


def engines_with_units(
    model: nn.Module,
) -> list[tuple[_native.Engine, tuple[UnitFacts, ...]]]:
    """Return the engines of ``model``, each with its units in its order.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: Nothing in it is sharded, or it is inside the root of its engine.
    """
    found = []
    engines = engines_in(model)
    names = {module: clean_name(f"{n}.")[:-1] for n, module in model.named_modules()}
    of_group = groups_in(model)
    for engine in engines:
        units = [
            _of_group(member, of_group[member])
            for member in _members(of_group, engine)
            if member in of_group
        ]
        for module in sharded_modules(model):
            if module._is_root and module._engine is engine:
                units = [_of_module(m, names[m]) for m in sharded_modules(module)]
        if not units or len(units) < sum(1 for _ in _members(of_group, engine)):
            raise ValueError(
                "this module is part of a larger sharded model that has run already: "
                "pass the outermost sharded module"
            )
        found.append((engine, tuple(units)))
    return found


def _members(
    groups: dict[Group, str], engine: _native.Engine
) -> Iterator[Group | None]:
    """Yield the groups of an engine, in its order; None for one that is gone."""
    for group in groups:
        if group.running is not None and group.running.engine is engine:
            yield from (member() for member in group.running.groups)
            return


def memory_stats(model: nn.Module) -> dict[str, int]:
    """Return what the engine of ``model`` holds and has done, on this rank.

    Keys ending in ``_nbytes`` are bytes, those beginning with ``num_`` counts:

    * num_clients, num_blocks, arena_nbytes, held_nbytes, peak_nbytes, num_allocs,
      num_frees: the arena of unsharded parameters and gradients; ``held`` are the
      blocks in use now, ``peak`` is the highest ``arena_nbytes`` so far. There are
      none between steps, unless parameters are kept there.
    * num_units, shard_nbytes, grad_shard_nbytes: the units, and the shards and
      sharded gradients of this rank, those that are allocated now.
    * partial_grad_nbytes, scratch_nbytes: sums of ``no_sync(sharded=True)``, and what
      reductions over gloo need beside the arena (on the CPU only while they run: the
      most so far).
    * ring_nbytes: shared memory that this rank reserves for its groups.
    * offloaded_nbytes, peak_offloaded_nbytes, pinned_nbytes: of
      :func:`fsdp_c.offload_activations`: saved tensors that are in host memory now,
      the most so far, and the pinned memory that is reserved for them.
    * num_downloads, num_uploads: storages that were copied there and back so far.
    * num_iterations, num_all_gathers, num_reduces, num_prefetches: since wrapping.

    Several engines (sharded modules without a common sharded ancestor) add up.

    Args:
        model: A sharded module, of either API, or one that contains some.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: Nothing in ``model`` is sharded.
    """
    total: dict[str, int] = {}
    for engine in engines_in(model):
        for key, value in engine.memory_stats().items():
            total[key] = total.get(key, 0) + value
    return total


def reset(model: nn.Module) -> None:
    """Make ``model`` usable again after an exception in the middle of a step.

    Drops the gradients that were not reduced yet, unsharded parameters and
    prefetches; parameters and gradients from before the step stay. All ranks must
    call it, since the failed step may have ended elsewhere on each.

    Args:
        model: A sharded module, of either API, or one that contains some.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: Nothing in ``model`` is sharded.
    """
    for engine in engines_in(model):
        engine.reset()
    for each in sharded_modules(model):
        each.end_state_dict_load()


def _groups(model: nn.Module) -> dict[Group, str]:
    """Return the groups in ``model``; a model without any must be of the other API."""
    groups = groups_in(model) if isinstance(model, nn.Module) else {}
    if not groups:
        require_sharded(model)
    return {group: clean_name(f"{name}.")[:-1] for group, name in groups.items()}


def _of_module(module: ShardedModule, name: str) -> UnitFacts:
    config = module._sharded.config
    prefetch = config.backward_prefetch
    return UnitFacts(
        name=name,
        strategy=config.sharding_strategy.name,
        device=module.compute_device,
        shard_group=config.groups.shard_group,
        replica_group=config.groups.replica_group,
        segments=module._sharded.unit.segments,
        param_dtype=config.mixed_precision.param_dtype,
        reduce_dtype=config.mixed_precision.reduce_dtype,
        buffer_dtype=config.mixed_precision.buffer_dtype,
        buffer_dtypes=tuple(
            buffer.dtype
            for _, each in own_modules(module.wrapped, module._sharded.ignored.modules)
            for buffer in each.buffers(recurse=False)
        ),
        forward_prefetch=config.forward_prefetch,
        backward_prefetch="" if prefetch is None else prefetch.name,
    )


def _of_group(group: Group, name: str) -> UnitFacts:
    arguments = group.arguments
    # A module's further groups have none of their own.
    its_modules = group.modules if group_of(group.modules[0]) is group else ()
    reshards = group.settings.reshards
    if reshards is None:
        is_root = not name if group.running is None else group.is_root
        reshards = not is_root
    return UnitFacts(
        name=group.label(name),
        strategy=_STRATEGIES[arguments.has_replicas, reshards],
        device=arguments.device,
        shard_group=arguments.data.shard_group,
        replica_group=arguments.data.replica_group,
        segments=_segments(group) if group.unit is None else group.unit.segments,
        param_dtype=arguments.precision.param_dtype,
        reduce_dtype=arguments.precision.reduce_dtype,
        buffer_dtype=None,
        buffer_dtypes=tuple(
            buffer.dtype
            for _, module in modules_of(its_modules)
            for buffer in module.buffers(recurse=False)
        ),
        forward_prefetch=bool(group.settings.prefetches[0]),
        backward_prefetch="BACKWARD_PRE",
    )


def _segments(group: Group) -> list[tuple[torch.dtype, bool, int, int, int, int]]:
    """Return the segments that the unit will have: one for each parameter."""
    params = group.params
    layout = _native.Layout(
        [
            (cut.local_shape.numel(), param.dtype, param.requires_grad)
            for param, cut in zip(params.sharded, params.cuts, strict=True)
        ],
        group.arguments.data.num_shards,
        align_params=False,
        align_shards=False,
        row_numels=[
            cut.local_shape.numel() // max(cut.local_shape[cut.dim], 1)
            for cut in params.cuts
        ],
    )
    return layout.segments
