"""docs/reference/api.md is what the docstrings say now, and they say enough."""

import ast
import importlib.util
import inspect
import re
from types import ModuleType
from typing import Any

import pytest

from helpers.doc_pages import ROOT

# Methods of nn.Module under their own meaning, and of FSDP1 that say what they are
# another name for.
SHORT = {
    "forward",
    "full_optim_state_dict",
    "flatten_sharded_optim_state_dict",
    "named_buffers",
    "named_parameters",
    "scatter_full_optim_state_dict",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
    "state_dict",
    "state_dict_type",
    "train",
}


def _load() -> ModuleType:
    path = ROOT / "docs" / "make_api.py"
    spec = importlib.util.spec_from_file_location("make_api", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE_API: Any = _load()


def test_page_is_fresh() -> None:
    written = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
    assert written == MAKE_API.page(), "run: python docs/make_api.py"


def test_headings_are_unique() -> None:
    lines = MAKE_API.page().splitlines()
    headings = [line.lower() for line in lines if line.startswith("### ")]
    assert len(headings) == len(set(headings))


def _entries() -> list[tuple[str, Any]]:
    """Return every public function, class and method, by its full name."""
    found: list[tuple[str, Any]] = []
    for module_name, module in MAKE_API.modules().items():
        for name in MAKE_API._split(module)[0]:
            value = getattr(module, name)
            found.append((f"{module_name}.{name}", value))
            if inspect.isclass(value):
                found += [
                    (f"{module_name}.{name}.{member}", getattr(value, member))
                    for member in MAKE_API._members(value)
                    if not isinstance(inspect.getattr_static(value, member), property)
                ]
    return found


ENTRIES = _entries()


@pytest.mark.parametrize("name", [name for name, _ in ENTRIES])
def test_every_argument_is_described(name: str) -> None:
    value = dict(ENTRIES)[name]
    docstring = inspect.getdoc(value)
    assert docstring, "no docstring"
    tree = MAKE_API._parse(inspect.unwrap(value))
    short_name = name.rpartition(".")[2]
    if isinstance(tree, ast.ClassDef) or short_name in SHORT:
        return
    if re.search(r"arguments\b[^.]* of :", docstring):  # those of another function
        return
    arguments = [*tree.args.args, *tree.args.kwonlyargs]
    names = [each.arg for each in arguments if each.arg != "self"]
    missing = [
        each
        for each in names
        if f"{each}:" not in docstring
        and f"{each}, " not in docstring
        and f"``{each}``" not in docstring
        and f"{each}(" not in docstring
    ]
    assert not missing


@pytest.mark.parametrize("name", [name for name, _ in ENTRIES])
def test_docstrings_are_whole(name: str) -> None:
    """A section of attributes has all fields; what raises says when."""
    value = dict(ENTRIES)[name]
    docstring = inspect.getdoc(value) or ""
    tree = MAKE_API._parse(inspect.unwrap(value))
    if isinstance(tree, ast.ClassDef):
        fields = [
            node.target.id
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        if "Attributes:" in docstring:
            assert not [f for f in fields if f[0] != "_" and f not in docstring]
        return
    raises = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    assert not raises or "Raises:" in docstring or "errors of :" in docstring


@pytest.mark.parametrize(
    ("docstring", "text"),
    [
        ("Do ``x``.", "Do `x`."),
        ("See :meth:`save`.", "See `save`."),
        (
            "Do.\n\nArgs:\n    a: One,\n        and more.\n    b: Two.",
            "Do.\n\n**Args**\n\n- `a`: One,\n  and more.\n- `b`: Two.",
        ),
        ("Do.\n\nReturns:\n    It.", "Do.\n\n**Returns:** It."),
    ],
)
def test_markdown(docstring: str, text: str) -> None:
    assert MAKE_API._markdown(docstring) == text
