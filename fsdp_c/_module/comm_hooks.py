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
        if each._config.sharding_strategy in HYBRID:
            raise AssertionError(
                "Communication hook is not supported for hybrid strategies: "
                f"{each._config.sharding_strategy}: unit {each._unit.name!r} reduces "
                "over two groups, a hook over one"
            )
        if each._comm_hook is not None:
            raise AssertionError("A communication hook is already registered")
        if each._unit.holds_grads:
            raise RuntimeError(
                f"unit {each._unit.name!r} holds gradients of a no_sync() backward: "
                "register the hook before the first step"
            )
    for each in modules:
        # Not by setattr(): a module among them would become a child.
        vars(each).update(_comm_hook=hook, _comm_hook_state=state)
        each._unit.set_reduce_hook(state, hook)
