"""Where a module has a name from: torch's FSDP, or fsdp_c itself."""

import ast
import functools
import inspect
import sys
from types import ModuleType

from fsdp_c.integrations._rebind import Binding


def comes_from_fsdp_c(binding: Binding) -> bool:
    """Return whether a module imports a name from fsdp_c, as its source says.

    While installed, the same object is behind torch's name and fsdp_c's: only the
    import tells which was meant. False where there is no source.
    """
    return _comes_from_fsdp_c(binding, set())


def _comes_from_fsdp_c(binding: Binding, seen: set[tuple[str, str]]) -> bool:
    module, name = binding
    key = (getattr(module, "__name__", ""), name)
    if key in seen:
        return False
    seen.add(key)
    for source, imported in _imports_of(module, name):
        root = source.partition(".")[0]
        if root in {"fsdp_c", "torch"}:
            return root == "fsdp_c"
        other = sys.modules.get(source)
        if other is not None and _comes_from_fsdp_c((other, imported), seen):
            return True
    return False


@functools.cache
def _imports_in(source: str) -> list[ast.ImportFrom]:
    """Return every ``from ... import`` of a source; parsing takes milliseconds."""
    nodes = ast.walk(ast.parse(source))
    return [node for node in nodes if isinstance(node, ast.ImportFrom)]


def _imports_of(module: ModuleType, name: str) -> list[tuple[str, str]]:
    """Return the modules and names that ``from ... import`` binds to ``name``."""
    try:
        imports = _imports_in(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return []
    package = getattr(module, "__package__", None) or ""
    found = []
    for node in imports:
        source = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*parents, *filter(None, [source])])
        found += [
            (source, alias.name)
            for alias in node.names
            if alias.name == "*" or name == (alias.asname or alias.name)
        ]
    # The last one counts.
    found.reverse()
    return [(source, name if each == "*" else each) for source, each in found]
