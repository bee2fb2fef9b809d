"""One changed function of another library: how it is found, checked and put back."""

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import CodeType, ModuleType
from typing import Any

from fsdp_c.integrations._rebind import Rebinding

Function = Callable[..., Any]


class IntegrationWarning(UserWarning):
    """Something of another library is not as fsdp_c's integration expects it."""


@dataclass(frozen=True)
class Patch:
    """A function of another library that behaves differently while installed.

    Attributes:
        module: The module that defines it.
        function: Its name there, as ``f`` or ``Class.method``.
        purpose: What works with it only, for the message when it cannot be applied.
        parameters: Parameters that it must have, with spaces between.
        mentions: Names and strings that its code must mention, likewise.
        wrap: Makes the new function from the one that is there.
    """

    module: str
    function: str
    purpose: str
    parameters: str
    mentions: str
    wrap: Callable[[Function], Function]

    def apply(self, module: ModuleType) -> "Applied | None":
        """Put the new function in place; warn and return None if it does not fit."""
        owner_name, _, name = self.function.rpartition(".")
        owner = getattr(module, owner_name, None) if owner_name else module
        original = None if owner is None else vars(owner).get(name)
        problem = self._problem(original)
        if problem:
            package = self.module.partition(".")[0]
            warnings.warn(
                f"{self.module}.{self.function} of {package} {version_of(package)} "
                f"{problem}: fsdp_c leaves it unchanged, and this change is missing: "
                f"{self.purpose}. Use a version that fsdp_c's "
                "docs/guide/huggingface.md lists",
                IntegrationWarning,
                stacklevel=2,
            )
            return None
        assert owner is not None
        return Applied(self, owner, name, original)

    def _problem(self, original: Any) -> str:
        if not inspect.isfunction(original):
            return "is not a function"
        names = inspect.signature(original).parameters.keys()
        missing = set(self.parameters.split()) - names
        if missing:
            return f"has no parameter {', '.join(sorted(missing))}"
        missing = set(self.mentions.split()) - mentioned_by(original)
        if missing:
            return f"does not mention {', '.join(sorted(missing))} any more"
        return ""


class Applied:
    """A patch that is in place.

    Attributes:
        patch: The patch.
    """

    def __init__(self, patch: Patch, owner: Any, name: str, original: Any) -> None:
        self.patch = patch
        self._owner = owner
        self._name = name
        self._original = original
        self._is_on = True
        changed = patch.wrap(original)

        # Others may have wrapped or stored it: undone, it does nothing anywhere.
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return (changed if self._is_on else original)(*args, **kwargs)

        self._replacement = replacement
        if inspect.isclass(owner):
            setattr(owner, name, replacement)
            self._rebinding = None
        else:
            self._rebinding = Rebinding(original, replacement)

    def undo(self) -> None:
        """Put the original back where the replacement still is."""
        self._is_on = False
        if self._rebinding is not None:
            self._rebinding.undo()
        elif vars(self._owner).get(self._name) is self._replacement:
            setattr(self._owner, self._name, self._original)


def version_of(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(unknown version)"


def mentioned_by(function: Function) -> set[str]:
    """Return the names and strings in a function's code, nested functions included."""
    return _mentioned_by_code(inspect.unwrap(function).__code__)


def _mentioned_by_code(code: CodeType) -> set[str]:
    found = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, (tuple, frozenset)):
            found.update(item for item in constant if isinstance(item, str))
        elif isinstance(constant, CodeType):
            found |= _mentioned_by_code(constant)
    return found
