"""One name means one class, and a wrapped module's fields are written in one file."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "fsdp_c").rglob("*.py"))
UNITS = ROOT / "fsdp_c" / "_units"
# The classes whose fields only their own file writes.
BASES = {UNITS / "base.py": "ShardedModule", UNITS / "owner.py": "Owner"}


def classes(path: Path) -> list[ast.ClassDef]:
    tree = ast.parse(path.read_text())
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def test_no_two_classes_have_the_same_name() -> None:
    found = defaultdict(list)
    for path in [*FILES, ROOT / "fsdp_c" / "_native.pyi"]:
        for each in classes(path):
            found[each.name].append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert not twice


def written(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that are assigned or deleted, but not those of self."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and not isinstance(node.ctx, ast.Load)
            and not (isinstance(node.value, ast.Name) and node.value.id == "self")
        ):
            yield node


@pytest.mark.parametrize("path", BASES)
def test_only_its_base_writes_a_wrapped_modules_fields(path: Path) -> None:
    (base,) = (each for each in classes(path) if each.name == BASES[path])
    fields = {
        node.target.id
        for node in base.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id.startswith("_")
    }
    assert fields
    wrong = [
        f"{other.relative_to(ROOT)}:{node.lineno} writes {node.attr}"
        for other in FILES
        if other != path
        for node in written(ast.parse(other.read_text()))
        if node.attr in fields
    ]
    assert not wrong, "\n".join(wrong)
