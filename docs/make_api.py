"""Writes docs/reference/api.md, all public names, from their docstrings.

    python docs/make_api.py           write it
    python docs/make_api.py --check   exit with 1 if it is not as it would be written

Signatures are taken from the source, so every version of Python writes the same page.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "reference" / "api.md"

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Source")
_ITEM = re.compile(r"(\*{0,2}[\w.]+(?:, \w+)*): (.*)", re.DOTALL)
_WIDTH = 88

HEAD = """\
# API reference

Made from the docstrings by `python docs/make_api.py`; do not edit it. What is not on
this page, or begins with an underscore, is not public. Sizes are in elements where a
name has `numel`, in bytes where it has `nbytes`.
"""


def main(words: list[str]) -> int:
    """Write the page, or with ``--check`` compare; return the exit status."""
    text = page()
    if words == ["--check"]:
        return 0 if TARGET.read_text("utf-8") == text else 1
    TARGET.write_text(text, "utf-8")
    return 0


def page() -> str:
    """Return the text of the page."""
    contents, body = [], []
    for name, module in modules().items():
        entries, borrowed = _split(module)
        links = (
            f"[{each}](#{_anchor(_heading(name, module, each))})" for each in entries
        )
        contents.append(f"- `{name}`: " + ", ".join(links))
        body += [f"## {name}", _markdown(inspect.getdoc(module) or "")]
        body += [text for entry in entries for text in _entry(name, module, entry)]
        if borrowed:
            names = ", ".join(f"`{each}`" for each in borrowed)
            body.append(f"torch's own, under the same names: {names}.")
    return "\n\n".join([HEAD.rstrip(), "\n".join(contents), *body]) + "\n"


def modules() -> dict[str, ModuleType]:
    """Return the modules that have an ``__all__`` and no underscore in their name."""
    package = import_module("fsdp_c")
    found = {"fsdp_c": package}
    for each in walk_packages(package.__path__, "fsdp_c."):
        if any(part.startswith("_") for part in each.name.split(".")):
            continue
        # Importing huggingface.auto would install.
        source = Path(find_spec(each.name).origin).read_text("utf-8")
        if "__all__ = " in source:
            found[each.name] = import_module(each.name)
    return found


def _split(module: ModuleType) -> tuple[list[str], list[str]]:
    """Return the public names that are documented here, and those that are torch's."""
    entries, borrowed = [], []
    for name in sorted(module.__all__, key=str.casefold):
        value = getattr(module, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if not value.__module__.startswith("fsdp_c"):
            borrowed.append(name)
        elif value.__name__ == name:  # not a second name, such as FSDP
            entries.append(name)
    return entries, borrowed


def _heading(module_name: str, module: ModuleType, name: str) -> str:
    """Return a heading that no other has, also where letters' case is ignored."""
    kind = "class " if inspect.isclass(getattr(module, name)) else ""
    return f"{kind}{module_name}.{name}"


def _anchor(heading: str) -> str:
    return heading.lower().replace(".", "").replace(" ", "-")


def _entry(module_name: str, module: ModuleType, name: str) -> Iterator[str]:
    """Yield the paragraphs of one class or function."""
    value = getattr(module, name)
    tree = _parse(value)
    yield f"### {_heading(module_name, module, name)}"
    if isinstance(tree, ast.ClassDef):
        yield _fence(_class_signature(module_name, name, tree))
    else:
        yield _fence(_signature(f"{module_name}.{name}", tree))
    yield _markdown(inspect.getdoc(value) or "")
    if isinstance(tree, ast.ClassDef) and "Attributes:" not in (value.__doc__ or ""):
        yield from _fields(value, tree)
    yield f"In `{_path(value)}`."
    if isinstance(tree, ast.ClassDef):
        for member in _members(value):
            yield from _member(value, name, member)


def _fields(cls: type, tree: ast.ClassDef) -> Iterator[str]:
    """Yield the list of a class's fields, each with the comment behind it."""
    lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    items = []
    for node in tree.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if not node.target.id.startswith("_"):
            comment = lines[(node.end_lineno or 0) - 1].partition("  # ")[2]
            items.append(
                f"- `{ast.unparse(node)}`" + (f": {comment}" if comment else "")
            )
    if items:
        yield "**Fields**"
        yield "\n".join(items)


def _member(cls: type, owner: str, name: str) -> Iterator[str]:
    """Yield the paragraphs of one method or property."""
    value = inspect.getattr_static(cls, name)
    is_static = isinstance(value, staticmethod)
    is_property = isinstance(value, property)
    function = value.__func__ if is_static else value.fget if is_property else value
    tree = _parse(inspect.unwrap(function))
    assert isinstance(tree, ast.FunctionDef)
    if is_property:
        returns = f" -> {ast.unparse(tree.returns)}" if tree.returns else ""
        signature = f"{owner}.{name}{returns}  # property"
    else:
        signature = _signature(f"{owner}.{name}", tree, skips_self=not is_static)
    yield f"#### {owner}.{name}"
    yield _fence(f"@staticmethod\n{signature}" if is_static else signature)
    yield _markdown(inspect.getdoc(function) or "")


def _members(cls: type) -> list[str]:
    """Return the public methods and properties of a class, in alphabetical order.

    Of FullyShardedDataParallel those that torch's class has too: the others are for
    the files of this package.
    """
    names = {
        name
        for each in cls.__mro__
        if each.__module__.startswith("fsdp_c")
        for name, value in vars(each).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, (staticmethod, property)))
    }
    if cls.__name__ == "FullyShardedDataParallel":
        names &= set(dir(TorchFSDP)) - {"extra_repr"}
    elif issubclass(cls, nn.Parameter):
        names = set()
    return sorted(names)


def _parse(value: Any) -> ast.AST:
    """Return the definition of a class or function in its source."""
    source = textwrap.dedent(inspect.getsource(value))
    return ast.parse(source).body[0]


def _path(value: Any) -> str:
    path = Path(inspect.getsourcefile(inspect.unwrap(value)) or "").resolve()
    return str(path.relative_to(ROOT))


def _fence(code: str) -> str:
    return f"```py\n{code}\n```"


def _class_signature(module_name: str, name: str, tree: ast.ClassDef) -> str:
    """Return how the class is constructed, or its name if users do not."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            if ast.get_docstring(tree) and "Args:" in (ast.get_docstring(tree) or ""):
                return _signature(f"class {module_name}.{name}", node, skips_self=True)
            break
    return f"class {module_name}.{name}"


def _signature(name: str, tree: ast.AST, *, skips_self: bool = False) -> str:
    """Return a call with all arguments; one a line where it is long."""
    assert isinstance(tree, ast.FunctionDef)
    arguments = tree.args
    if skips_self:
        arguments.args = arguments.args[1:]
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns else ""
    if name.startswith("class "):
        returns = ""
    line = f"{name}({ast.unparse(arguments)}){returns}"
    if len(line) <= _WIDTH:
        return line
    each = "".join(f"    {part},\n" for part in _parts(arguments))
    return f"{name}(\n{each}){returns}"


def _parts(arguments: ast.arguments) -> Iterator[str]:
    """Yield the arguments of a signature one by one."""
    missing = len(arguments.args) - len(arguments.defaults)
    defaults: list[ast.expr | None] = [None] * missing + list(arguments.defaults)
    for argument, default in zip(arguments.args, defaults, strict=True):
        yield _part(argument, default)
    if arguments.vararg is not None:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(
        arguments.kwonlyargs, arguments.kw_defaults, strict=True
    ):
        yield _part(argument, default)
    if arguments.kwarg is not None:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _part(argument: ast.arg, default: ast.expr | None) -> str:
    text = ast.unparse(argument)
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _markdown(docstring: str) -> str:
    """Return a docstring of Google's form as Markdown."""
    paragraphs: list[str] = []
    section = ""
    lines: list[str] = []

    def finish() -> None:
        if section:
            paragraphs.append(_section(section, "\n".join(lines)))
        elif lines:
            paragraphs.append("\n".join(lines).strip())
        lines.clear()

    for line in docstring.splitlines():
        title = line.rstrip(":")
        if line.endswith(":") and title in SECTIONS:
            finish()
            section = title
        else:
            lines.append(line)
    finish()
    text = "\n\n".join(each for each in paragraphs if each)
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def _section(title: str, body: str) -> str:
    """Return one section: items as a list, the rest as a paragraph."""
    body = textwrap.dedent(body).strip()
    if title == "Example":
        return f"**{title}**\n\n```pycon\n{body.replace('  # doctest: +SKIP', '')}\n```"
    items: list[list[str]] = []
    for line in body.splitlines():
        if line.startswith(" ") and items:
            items[-1].append(line.strip())
        else:
            items.append([line])
    texts = ["\n  ".join(lines) for lines in items]
    found = [_ITEM.fullmatch(text) for text in texts]
    if title in ("Args", "Attributes", "Raises") and all(found):
        listed = [f"- `{each[1]}`: {each[2]}" for each in found if each]
        return f"**{title}**\n\n" + "\n".join(listed)
    return f"**{title}:** {body}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
