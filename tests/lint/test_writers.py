"""Fields of private structs are written by the files that their comments name.

A comment that begins with names of files names the only files of the room that write
the field::

    bool is_summoned; /* summon.c: whole parameters are shown */

On a line of its own it stands for the fields up to the next blank line or comment line.
Functions named ``*_create`` may initialise every field of what they create (``self``).
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.rooms import CSRC

ROOMS = sorted({path.parent for path in CSRC.rglob("*_priv.h")})

FILES = r"(?:[a-z]\w*\.c(?:, )?)+"
OWNED = re.compile(rf"/\*\s*({FILES})(?::|\s*\*/)")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
LITERAL = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'")
FIELD = re.compile(r"^\s+(?:\w+[ *]+)+(\w+)(?:\[\w+\])?;")
CREATE = re.compile(r"^\w+ fsdp_\w+_create\(.*?^}", re.MULTILINE | re.DOTALL)


class Field(NamedTuple):
    """A field and the files that may write it; none: every file may."""

    name: str
    writers: frozenset[str]


def fields_of(header: str) -> Iterator[Field]:
    """Find the fields of the structs in the text of a header."""
    # One line for each comment, so that lines tell where it stands.
    joined = COMMENT.sub(lambda found: " ".join(found.group().split()), header)
    heading: frozenset[str] = frozenset()
    for line in joined.splitlines():
        owned = OWNED.search(line)
        named = frozenset(owned[1].split(", ")) if owned is not None else frozenset()
        field = FIELD.match(line)
        if field is not None:
            yield Field(field[1], named or heading)
        else:
            heading = named


@functools.cache
def code_of(source: str) -> str:
    """Return a source without comments, literals and what initialises."""
    text = LITERAL.sub('""', COMMENT.sub(" ", source))
    return CREATE.sub(lambda match: match.group().replace("self->", ""), text)


def writes_in(source: str, field: str) -> list[str]:
    """Return the places in the text of a source that may write ``field``."""
    text = code_of(source)
    if field not in text:
        return []
    member = rf"\b[\w\->.\[\]]*(?:->|\.){field}\b(?:\[[^\]]*\])*"
    assigned = rf"{member}\s*(?:[-+|&*/^]|<<|>>)?=(?!=)|{member}(?:\+\+|--)"
    pattern = rf"{assigned}|(?:\+\+|--){member}|(?<!&)&{member}(?!\s*(?:->|\.))"
    pattern += rf"|\bmem(?:set|cpy|move)\(\s*{member}"
    found = [match.group() for match in re.finditer(pattern, text)]
    return [" ".join(place.split()) for place in found]


def wrong_writes(room: Path) -> list[str]:
    """Return the writes in ``room`` by files that the comments do not name."""
    fields: dict[str, list[Field]] = {}
    for header in sorted(room.glob("*.h")):
        for field in fields_of(header.read_text()):
            fields.setdefault(field.name, []).append(field)
    wrong = []
    for name, alike in fields.items():
        # Names do not tell structs apart: all files that may write one of them may.
        if not all(field.writers for field in alike):
            continue
        writers = frozenset().union(*(field.writers for field in alike))
        allowed = ", ".join(sorted(writers))
        wrong += [
            f"{room.name}/{writer} is named as the writer of {name}, but is no file"
            for writer in sorted(writers)
            if not (room / writer).exists()
        ]
        wrong += [
            f"{room.name}/{source.name}: {place} (written by {allowed})"
            for source in sorted(room.glob("*.[ch]"))
            if source.name not in writers
            for place in writes_in(source.read_text(), name)
        ]
    return wrong


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_only_the_named_files_write(room: Path) -> None:
    wrong = wrong_writes(room)
    assert not wrong, "\n".join(wrong)


HEADER = """
/* z.c: what it is for */
struct thing {
  int free;
  int one; /* a.c: alone,
              over two lines */
  /* a.c, b.c: a group */
  int *two;
  bool three;

  int four[2];
  bool five; /* c.c */
};
"""


def test_fields_are_found() -> None:
    assert {field.name: set(field.writers) for field in fields_of(HEADER)} == {
        "free": set(),
        "one": {"a.c"},
        "two": {"a.c", "b.c"},
        "three": {"a.c", "b.c"},
        "four": set(),
        "five": {"c.c"},
    }


@pytest.mark.parametrize(
    ("source", "is_write"),
    [
        ("x->one = 1;", True),
        ("x[i].one += 1;", True),
        ("x->y.one[i]++;", True),
        ("--x->one;", True),
        ("take(&x->one);", True),
        ("memset(x->one, 0, 4);", True),
        ("if (x->one == 1) y = x->one;", False),
        ("f((thing){.one = 1});", False),
        ("if (a && x->one) /* x->one = 1; */ f(&x->one->y);", False),
        ("fsdp_status fsdp_thing_create(int x) {\n  self->one = 1;\n}", False),
    ],
)
def test_writes_are_found(source: str, is_write: bool) -> None:
    assert bool(writes_in(source, "one")) == is_write
