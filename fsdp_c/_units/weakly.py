"""Methods that native code calls without keeping their object alive."""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod


def weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """Return what calls a bound method as long as its object is there."""
    reference = WeakMethod(method)

    def call(*args: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*args)

    return call
