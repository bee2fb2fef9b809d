"""register_forward_method: other methods than forward, with whole parameters."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp_c._engines.engine import ensure_engine
from fsdp_c._torch_compat import interpreted
from fsdp_c._units.base import ShardedModule


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.<method_name>(...)`` run like forward, with whole parameters.

    The wrapped module's method of that name then runs as its forward does: the
    unit's parameters are gathered, inputs cast, outputs hooked for backward, and
    the module is the root of the step if nothing around it runs. Without it, a
    method such as ``encode`` or ``generate`` sees sharded parameters.

    Only calls on ``module`` itself are covered; a call on the module inside it
    (``module.module``) is a plain one, as in its own ``forward``. Hooks that were
    registered with ``module.register_forward_hook`` do not run.

    Args:
        module: A FullyShardedDataParallel module.
        method_name: A method of the module in it.

    Raises:
        TypeError: ``module`` is not wrapped, or the attribute is not a method.
        AttributeError: There is no such method.
        ValueError: The name belongs to FullyShardedDataParallel or nn.Module, or
            the method is a generator or a coroutine, whose body would run after
            the parameters are gone.

    Example:
        >>> model = FSDP(model)  # doctest: +SKIP
        >>> register_forward_method(model, "encode")  # doctest: +SKIP
        >>> loss = model.encode(tokens).sum()  # doctest: +SKIP

    Source:
        ``register_fsdp_forward_method`` of torch's FSDP2, which FSDP1 lacks.
    """
    if not isinstance(module, ShardedModule):
        raise TypeError(
            "module must be a FullyShardedDataParallel module, got "
            f"{type(module).__name__}: register the method on the wrapped one, or with "
            "register_fsdp_forward_method() if fully_shard() sharded the module"
        )
    inner = type(module.wrapped).__name__
    if not isinstance(method_name, str):
        raise TypeError(f"method_name must be a str, got {method_name!r}")
    if hasattr(type(module), method_name):
        raise ValueError(
            f"{method_name!r} is an attribute of {type(module).__name__} itself and "
            f"cannot be {inner}'s: rename the method of {inner}"
        )
    method = getattr(module.wrapped, method_name, None)
    if method is None:
        raise AttributeError(f"{inner} has no method {method_name!r}")
    if not callable(method) or isinstance(method, nn.Module):
        raise TypeError(
            f"{method_name!r} of {inner} is a {type(method).__name__}, not a method"
        )
    if any(
        is_lazy(method)
        for is_lazy in (
            inspect.isgeneratorfunction,
            inspect.iscoroutinefunction,
            inspect.isasyncgenfunction,
        )
    ):
        raise ValueError(
            f"{method_name!r} of {inner} is a generator or a coroutine: its body would "
            "run after the call, when the parameters are sharded again; register a "
            "method that returns its result"
        )
    module.add_forward_method(method_name)


@interpreted
def run_forward_method(
    module: ShardedModule, method: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Let the unit of ``module`` run ``method`` of the wrapped module."""
    if module._running is None:
        ensure_engine(module)
    return module._sharded.unit.forward(method, args, kwargs)
