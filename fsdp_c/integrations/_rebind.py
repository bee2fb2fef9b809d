"""Puts one object in another's place under every name of every imported module."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

# A name of a module.
Binding = tuple[ModuleType, str]


def bindings_of(value: object) -> Iterator[Binding]:
    """Yield every name of an imported module that is bound to ``value`` itself.

    fsdp_c's own modules are left out.
    """
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "fsdp_c":
            continue
        # Only what is stored: a module's __getattr__ may import things.
        try:
            names = list(object.__getattribute__(module, "__dict__").items())
        except AttributeError:  # not a module: anything may be in sys.modules
            continue
        for name, bound in names:
            if bound is value:
                yield module, name


class Rebinding:
    """``new`` in the place of ``old``, until it is undone.

    Args:
        old: What modules hold.
        new: What they hold from now on.
        keeps: Decides when it is undone whether a name that got ``new`` in the
            meantime keeps it, because it was not meant as ``old``.
    """

    def __init__(
        self,
        old: object,
        new: object,
        keeps: Callable[[Binding], bool] = lambda binding: False,
    ) -> None:
        self._old = old
        self._new = new
        self._keeps = keeps
        # By the modules' identity: they may be replaced in sys.modules.
        self._had_new = {(id(module), name) for module, name in bindings_of(new)}
        for binding in bindings_of(old):
            self._bind(binding, new)

    def undo(self) -> None:
        """Give ``old`` back to all who held it, and to those imported since."""
        for binding in bindings_of(self._new):
            module, name = binding
            if (id(module), name) in self._had_new or self._keeps(binding):
                continue
            self._bind(binding, self._old)

    @staticmethod
    def _bind(binding: Binding, value: Any) -> None:
        module, name = binding
        object.__getattribute__(module, "__dict__")[name] = value
