"""Puts one object in another's place under every name of every imported module."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

# A name of a module.
Binding = tuple[ModuleType, str]


def bindings_of(*values: object) -> Iterator[tuple[Binding, object]]:
    """Yield every name of an imported module that is bound to one of ``values`` itself.

    fsdp_c's own modules are left out.
    """
    wanted = {id(value) for value in values}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "fsdp_c":
            continue
        # Only what is stored: a module's __getattr__ may import things.
        try:
            names = object.__getattribute__(module, "__dict__").copy()
        except AttributeError:  # not a module: anything may be in sys.modules
            continue
        if wanted.isdisjoint(map(id, names.values())):
            continue
        for name, bound in names.items():
            if id(bound) in wanted:
                yield (module, name), bound


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
        self._had_new: set[tuple[int, str]] = set()
        # All are found before any changes: a module may have two names.
        for binding, value in list(bindings_of(old, new)):
            module, name = binding
            if value is new:
                self._had_new.add((id(module), name))
            else:
                self._bind(binding, new)

    def undo(self) -> None:
        """Give ``old`` back to all who held it, and to those imported since."""
        for binding, _ in bindings_of(self._new):
            module, name = binding
            if (id(module), name) in self._had_new or self._keeps(binding):
                continue
            self._bind(binding, self._old)

    @staticmethod
    def _bind(binding: Binding, value: Any) -> None:
        module, name = binding
        object.__getattribute__(module, "__dict__")[name] = value
