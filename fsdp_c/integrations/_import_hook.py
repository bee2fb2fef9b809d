"""Calls functions when given modules are executed; needs neither torch nor fsdp_c.

The sitecustomize of ``python -m fsdp_c launch`` loads this file by its path, in
processes that may never import torch.
"""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportHook(MetaPathFinder):
    """A finder that finds nothing itself: it only wraps what others find.

    Args:
        before: Called with the module just before its code runs, by module name.
        after: Called with the module just after its code ran, by module name.
    """

    def __init__(
        self,
        before: Mapping[str, Callable[[ModuleType], None]] | None = None,
        after: Mapping[str, Callable[[ModuleType], None]] | None = None,
    ) -> None:
        self._before = dict(before or {})
        self._after = dict(after or {})
        self._searching = threading.local()

    def add(self) -> None:
        """Take part in imports from now on."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Take no part any more. Modules being imported still call."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return what the other finders find, with a loader that calls."""
        before, after = self._before.get(fullname), self._after.get(fullname)
        if before is None and after is None:
            return None
        # Two hooks would ask each other forever.
        names: set[str] = self._searching.__dict__.setdefault("names", set())
        if fullname in names:
            return None
        names.add(fullname)
        try:
            spec = self._find_with_others(fullname, path, target)
        finally:
            names.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, before, after)
        return spec

    def _find_with_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


class _CallingLoader(Loader):
    """A loader that calls functions around ``exec_module`` of another one.

    The module itself gets the other one as its loader, so that nobody who looks at
    a module sees this class.
    """

    def __init__(
        self,
        inner: Any,
        before: Callable[[ModuleType], None] | None,
        after: Callable[[ModuleType], None] | None,
    ) -> None:
        self._inner = inner
        self._before = before
        self._after = after

    def __getattr__(self, name: str) -> Any:
        """Answer as the other loader, for those who only look for a module."""
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as the other loader does."""
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, and the functions around it."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        if self._before is not None:
            self._before(module)
        self._inner.exec_module(module)
        if self._after is not None:
            self._after(module)
