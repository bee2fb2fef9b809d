"""summon_full_params: whole parameters between steps."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from fsdp_c._engines.engine import ensure_engines
from fsdp_c._engines.flat_views import follow_summon
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.sessions import SummonSession


class SummonError(AssertionError, RuntimeError):
    """summon_full_params() at a wrong moment.

    FSDP1 raises an AssertionError; the rest of fsdp_c a RuntimeError.
    """


@contextmanager
def summoned(
    module: ShardedModule, *, writeback: bool, clean_names: bool = False
) -> Iterator[None]:
    """Show the whole parameters of one unit, and register the original ones.

    All ranks of the unit's group must enter. With ``writeback``, what is written
    to this rank's part is kept, after an exception too. A unit that is summoned
    already stays so.

    Raises:
        RuntimeError: The unit is inside forward or backward.
    """
    with ExitStack() as stack:
        if not module._sharded.unit.is_summoned:
            module._sharded.originals.check()
            module._sharded.unit.summon()
            stack.callback(follow_summon, module)
            stack.callback(module._sharded.unit.dismiss, writeback)
            follow_summon(module)
        stack.enter_context(module._sharded.originals.shown())
        if clean_names:
            stack.enter_context(_clean_names(module))
        yield


@contextmanager
def _clean_names(module: ShardedModule) -> Iterator[None]:
    if module.find_session(SummonSession) is not None:
        yield
        return
    module.begin_session(SummonSession())
    try:
        yield
    finally:
        module.end_session(SummonSession)


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
    *,
    recurse: bool,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Iterator[None]:
    """Show the whole parameters of all units in ``module``.

    See ``FullyShardedDataParallel.summon_full_params``.
    """
    ensure_engines(module)
    modules = [each for each in sharded_modules(module) if recurse or each is module]
    for each in modules:
        _check_moment(each)
    for each in modules:
        each._sharded.originals.check()
    with ExitStack() as stack:
        for each in modules:
            each._sharded.unit.summon(
                on_first_rank_only=rank0_only,
                on_host=offload_to_cpu,
                with_grads=with_grads,
            )
            stack.callback(follow_summon, each)
            stack.callback(each._sharded.unit.dismiss, writeback)
            follow_summon(each)
            if not rank0_only or each.is_first_in_shard_group:
                stack.enter_context(each._sharded.originals.shown())
            stack.enter_context(_clean_names(each))
        yield
