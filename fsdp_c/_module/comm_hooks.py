"""register_comm_hook: the user's function in place of the gradient reduction."""

from collections.abc import Callable
from typing import Any

from fsdp_c._module.attributes import Attributes
from fsdp_c._units.base import sharded_modules
from fsdp_c._units.groups import HYBRID


def register_comm_hook(
    module: Attributes, state: Any, hook: Callable[..., Any]
) -> None:
    """Let ``hook`` reduce the gradients of all units in ``module``.

    See ``FullyShardedDataParallel.register_comm_hook``.
    """
    if not callable(hook):
        raise ValueError(f"The communication hook must be callable but got {hook!r}")
    if not module.check_is_root():
        raise AssertionError(
            "register_comm_hook can only be called on a root instance."
        )
    modules = list(sharded_modules(module))
    for each in modules:
        strategy = each._sharded.config.sharding_strategy
        if strategy in HYBRID:
            raise AssertionError(
                "Communication hook is not supported for hybrid strategies: "
                f"{strategy}: unit {each._sharded.name!r} reduces "
                "over two groups, a hook over one"
            )
        if each._comm_hook is not None:
            raise AssertionError("A communication hook is already registered")
        if each._sharded.unit.holds_grads:
            raise RuntimeError(
                f"unit {each._sharded.name!r} holds gradients of a no_sync() backward: "
                "register the hook before the first step"
            )
    for each in modules:
        each.adopt_comm_hook(state, hook)
