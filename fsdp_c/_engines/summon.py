"""summon_full_params: whole parameters between steps."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from fsdp_c._engines.engine import ensure_engine
from fsdp_c._engines.flat_views import follow_summon
from fsdp_c._units.base import ShardedModule, find_fully_shard, sharded_modules


class SummonError(AssertionError, RuntimeError):
    """summon_full_params() at a wrong moment.

    FSDP1 raises an AssertionError; the rest of fsdp_c a RuntimeError.
    """


def _summon(
    stack: ExitStack, module: ShardedModule, writeback: bool, **options: bool
) -> None:
    """Show the whole parameters of one unit until ``stack`` is left."""
    unit = module._sharded.unit
    unit.show_kept(False)
    cleared = _without_grad(module) if options.get("with_grads") else []
    unit.summon(**options)
    stack.callback(follow_summon, module)
    stack.callback(_clear_again, cleared)
    stack.callback(unit.dismiss, writeback)
    follow_summon(module)


def _without_grad(module: ShardedModule) -> list[nn.Parameter]:
    """Return the parameters between steps whose gradient is None."""
    originals = module._sharded.originals
    flat_params: list[nn.Parameter] = list(originals.flat_params())
    params = flat_params or [use.param for use in originals.uses]
    return [param for param in params if param.grad is None]


def _clear_again(params: list[nn.Parameter]) -> None:
    """Clear the gradients of ``params``, unless the user wrote some.

    A summon shows zeros for them, since another rank may have a gradient. An
    optimizer would step a parameter whose gradient is zeros.
    """
    for param in params:
        if param.grad is not None and not param.grad.any():
            param.grad = None


@contextmanager
def summoned(
    module: ShardedModule, *, writeback: bool, as_dtensors: bool = False
) -> Iterator[None]:
    """Show the whole parameters of one unit, and register the original ones.

    Those of a tensor parallel mesh are their local tensors, or DTensors.

    All ranks of the unit's group must enter. With ``writeback``, what is written
    to this rank's part is kept, after an exception too. A unit that is summoned
    already stays so.
    """
    with ExitStack() as stack:
        if not module._sharded.unit.is_summoned:
            module._sharded.originals.check()
            _summon(stack, module, writeback)
        stack.enter_context(module._sharded.originals.shown(as_dtensors=as_dtensors))
        yield


def _check_moment(module: ShardedModule) -> None:
    """Raise unless the unit of ``module`` can be summoned now.

    Source:
        The beginnings of the messages: ``_unshard_params_for_summon`` (torch 2.13,
        ``fsdp/_unshard_param_utils.py``).
    """
    name, engine = module._sharded.name, module._engine
    if module._sharded.unit.is_summoned:
        raise SummonError(
            "Cannot manually unshard parameters when already unsharding parameters: "
            f"those of unit {name!r} are summoned already, and summon_full_params() "
            "cannot be nested"
        )
    if engine is not None and (engine.in_forward or engine.in_backward):
        place = "backward" if engine.in_backward else "forward"
        raise SummonError(
            "Cannot manually unshard parameters during forward/backward: the "
            f"parameters of unit {name!r} cannot be summoned inside {place}; call "
            "summon_full_params() between steps, and fsdp_c.reset(model) first after "
            "an exception in the middle of one"
        )


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show the whole parameters of all units in ``module``, between steps.

    Inside, names of parameters and buffers are those of the unwrapped module,
    and the original parameters are registered. All ranks must enter and leave.

    Args:
        module: A wrapped module, or one that contains wrapped modules.
        recurse: Also the units inside ``module``'s own.
        writeback: Keep what is written; each rank keeps the part that it holds,
            so write the same on all ranks. With NO_SHARD it is kept either way
            (but for offloaded parameters, offload_to_cpu and rank0_only), as in
            FSDP1: what is shown is the parameters' own storage.
        rank0_only: Only rank 0 of each sharding group shows them; the other ranks
            take part but see their shards. With ``writeback`` all ranks get
            what rank 0 has written (of HYBRID_SHARD and NO_SHARD: the first
            replica's), which FSDP1 refuses.
        offload_to_cpu: Show them in host memory; the device holds one unit at a
            time.
        with_grads: Show whole gradients in ``param.grad`` as well, also with
            ``use_orig_params=False``; with ``writeback`` they are kept.
            Gradients that no_sync() left unreduced stay as they are.

    Modules of fully_shard() stay as they are, with a warning; torch says nothing.

    Raises:
        RuntimeError: Inside forward or backward, or summoned already.
    """
    if (name := find_fully_shard(module)) is not None:
        warnings.warn(
            f"summon_full_params() leaves module {name!r} as it is, since it is one of "
            "fully_shard(): call unshard() and reshard() of such modules, or "
            "full_tensor() of parameters, to see whole ones",
            stacklevel=3,
        )
    modules = [each for each in sharded_modules(module) if recurse or each is module]
    for each in modules:
        ensure_engine(each)
        _check_moment(each)
    for each in modules:
        each._sharded.originals.check()
    with ExitStack() as stack:
        for each in modules:
            _summon(
                stack,
                each,
                writeback,
                on_first_rank_only=rank0_only,
                on_host=offload_to_cpu,
                with_grads=with_grads,
            )
            if not rank0_only or each.shard_rank == 0:
                stack.enter_context(each._sharded.originals.shown(as_dtensors=True))
        yield
