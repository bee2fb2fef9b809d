"""Models of either API: their units and engines, for tools that take both."""

from torch import nn

from fsdp_c import _native
from fsdp_c._engines.engine import ensure_engines
from fsdp_c._units.base import require_owners, sharded_modules
from fsdp_c._units.owner import UnitFacts, owners_in, owners_of


def units_in(model: nn.Module) -> list[UnitFacts]:
    """Return the units in ``model``, parents first. Changes nothing.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: Nothing in it is sharded.
    """
    return [owner.unit_facts(name) for owner, name in require_owners(model).items()]


def engines_in(model: nn.Module) -> list[_native.Engine]:
    """Return the engines of all units in ``model``, made if need be, parents first.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: Nothing in it is sharded.
    """
    require_owners(model)
    return ensure_engines(model)


def root_engine(module: nn.Module) -> _native.Engine | None:
    """Return the engine whose root ``module`` is; None if it is not one."""
    return next((o._engine for o in owners_of(module) if o._is_root), None)


def engines_with_units(
    model: nn.Module,
) -> list[tuple[_native.Engine, tuple[UnitFacts, ...]]]:
    """Return the engines of ``model``, each with its units in its order.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: Nothing in it is sharded, or it is inside the root of its engine.
    """
    engines_in(model)
    names = owners_in(model)
    found: dict[_native.Engine, tuple[UnitFacts, ...]] = {}
    for owner in names:
        assert owner._running is not None
        engine, refs = owner._running
        if engine in found:
            continue
        members = [member for ref in refs if (member := ref()) is not None]
        if not names.keys() >= set(members):
            raise ValueError(
                "this module is part of a larger sharded model that has run already: "
                "pass the outermost sharded module"
            )
        found[engine] = tuple(each.unit_facts(names[each]) for each in members)
    return list(found.items())


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

    ``memory_stats()`` of a :class:`fsdp_c.WholeParameterOptimizer` has the memory of
    its rounds.

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
    # A model without an engine, as after a first forward that could not make one, has
    # nothing to reset.
    running = [owner._running for owner in require_owners(model)]
    for engine in {id(each.engine): each.engine for each in running if each}.values():
        engine.reset()
    for each in sharded_modules(model):
        each.end_state_dict_load()
