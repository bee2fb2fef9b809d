"""What the files of csrc define for each other, and what each uses of the others.

A file uses another where it names a function or table that the other defines for
others. Inline functions and macros of headers count for the files that use them. Calls
through function pointers do not count: that is how a lower file reaches a higher one.
Of C++ methods only those with an underscore in their name count: what ``x.wait()``
calls cannot be told from the text.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from helpers.rooms import FILES

NOISE = re.compile(
    r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)
MACRO = re.compile(r"^[ \t]*\#[ \t]*define[ \t]+(\w+)((?:[^\n]*\\\n)*[^\n]*)", re.M)
DIRECTIVE = re.compile(r"^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
# What opens a scope with definitions in it.
SCOPE = re.compile(
    r"\s*(?:extern\s*$|(?:inline\s+)?(namespace)\b\s*([\w:]*)\s*$|"
    r"(?:typedef\s+)?(?:struct|class)\s+(?:\w+\s+)?(\w+)[^()=]*$)"
)
FUNCTION = re.compile(r"((?:\w+::)*~?\w+)\s*\(")
DATA = re.compile(r"(\w+)\s*(?:\[[^\]]*\]\s*)*=\s*$")
ATTRIBUTE = re.compile(r"\b(?:FSDP_\w+|__attribute__\s*\(\(.*?\)\)|alignas\(.*?\))")
BRACKETS = {"(": r"[()]", "{": r"[{}]"}
USE = re.compile(r"(->|\.|::|&)?\s*\b([A-Za-z_]\w*)\b(?=(\s*\()?)")


STANDARD = {"wait_for"}  # methods of the C++ library too


class Definition(NamedTuple):
    """A function or table that a file defines."""

    name: str
    is_method: bool
    is_external: bool
    body: str


def blank(text: str) -> str:
    """Return ``text`` without comments and literals, in the same places."""
    return NOISE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def end_of(text: str, begin: int) -> int:
    """Return where the bracket that opens at ``begin`` closes, exclusive."""
    opens = text[begin]
    depth = 0
    for match in re.compile(BRACKETS[opens]).finditer(text, begin):
        depth += 1 if match.group() == opens else -1
        if depth == 0:
            return match.end()
    return len(text)


def definitions_in(
    text: str, *, is_hidden: bool = False, within: str = ""
) -> Iterator[Definition]:
    """Find what is defined in ``text``, where it is a file or inside of a scope."""
    begin = 0
    for match in iter(re.compile(r"[{;]").finditer(text)):
        if match.start() < begin:
            continue
        head = ATTRIBUTE.sub("", text[begin : match.start()])
        if match.group() == ";":
            begin = match.end()
            continue
        end = end_of(text, match.start())
        body = text[match.end() : end - 1]
        scope = SCOPE.match(head)
        if scope is not None:
            hidden = is_hidden or (scope[1] is not None and scope[2] == "")
            inner = scope[3] or within
            yield from definitions_in(body, is_hidden=hidden, within=inner)
            begin = end
            continue
        is_external = not is_hidden and re.search(r"\bstatic\b", head) is None
        data = DATA.search(head)
        function = FUNCTION.search(re.sub(r"\btemplate\s*<[^>]*>", "", head))
        if data is not None:
            yield Definition(data[1], False, is_external, body)
        elif function is not None:
            path, _, name = function[1].rpartition("::")
            is_method = bool(path or within)
            yield Definition(name, is_method, is_external, head + body)
        begin = end


class Source(NamedTuple):
    """A file: what it defines, and all of its text that may use something."""

    text: str
    definitions: list[Definition]


@cache
def source_of(path: Path) -> Source:
    text = blank(path.read_text())
    found = list(definitions_in(DIRECTIVE.sub("", text)))
    found += [
        Definition(name, False, False, body) for name, body in MACRO.findall(text)
    ]
    return Source(text, found)


def is_source(path: Path) -> bool:
    """Return whether a file is compiled by itself."""
    return path.suffix not in {".h", ".hpp"}


class Names(NamedTuple):
    """Who defines what: names of functions and tables, and names of methods."""

    functions: dict[str, Path]
    methods: dict[str, set[Path]]
    inlines: dict[str, list[str]]


@cache
def names() -> Names:
    functions: dict[str, Path] = {}
    methods: dict[str, set[Path]] = {}
    inlines: dict[str, list[str]] = {}
    for path in FILES:
        for found in source_of(path).definitions:
            if not is_source(path):
                inlines.setdefault(found.name, []).append(found.body)
            elif found.is_method:
                if "_" in found.name and found.name not in STANDARD:
                    methods.setdefault(found.name, set()).add(path)
            elif found.is_external:
                functions[found.name] = path
    return Names(functions, methods, inlines)


def uses_in(
    text: str, own: set[str], seen: set[str], *, is_c: bool
) -> Iterator[tuple[str, Path]]:
    """Find what ``text`` uses of other files, through inline functions too."""
    known = names()
    for mark, name, is_call in USE.findall(text):
        if mark in {"->", "."}:
            if not is_c and is_call and len(known.methods.get(name, ())) == 1:
                yield name, next(iter(known.methods[name]))
            continue
        if name in own:
            continue
        is_certain = name.startswith("fsdp_") or is_call or mark == "&"
        if name in known.functions and is_certain:
            yield name, known.functions[name]
        elif name in known.inlines and name not in seen:
            seen.add(name)
            for body in known.inlines[name]:
                yield from uses_in(body, own, seen, is_c=is_c)


@cache
def uses_of(path: Path) -> dict[str, Path]:
    """Return what ``path`` uses of other files, by name."""
    source = source_of(path)
    own = {d.name for d in source.definitions if not d.is_method}
    uses = uses_in(source.text, own, set(), is_c=path.suffix == ".c")
    return {name: other for name, other in uses if other != path}


SOURCES = [path for path in FILES if is_source(path)]
