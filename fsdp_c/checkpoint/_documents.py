"""JSON documents that carry their own checksum.

A document is one JSON object whose first member is the CRC-32C of every byte after
it, so that it is checked before it is parsed. The parser is strict: no duplicate
keys, no NaN or infinity, no deep nesting, no trailing data.
"""

import json
import math
import re
from typing import Any, NoReturn

from fsdp_c._native import crc32c

MAX_NBYTES = 1 << 30
_HEAD = re.compile(rb'\{"crc32c": "([0-9a-f]{8})",\n')


def dump(value: dict[str, Any]) -> bytes:
    """Return the document of ``value``: plain JSON values, one member a line.

    Raises:
        ValueError: A value is NaN or infinite, or nested too deep.
    """
    try:
        members = [
            f"{json.dumps(key)}: {json.dumps(member, allow_nan=False)}"
            for key, member in value.items()
        ]
    except RecursionError:
        raise ValueError("values are nested too deep for JSON") from None
    tail = (",\n".join(members) + "\n}\n").encode("ascii")
    return sign(tail)


def sign(tail: bytes) -> bytes:
    """Return the document whose bytes after the checksum are ``tail``."""
    return b'{"crc32c": "%08x",\n' % crc32c(tail) + tail


def parse(data: bytes) -> dict[str, Any]:
    """Return the members of a document.

    Raises:
        ValueError: It is not such a document, or is damaged.
    """
    match = _HEAD.match(data)
    if match is None:
        raise ValueError("it does not begin with a checksum of its own")
    if crc32c(memoryview(data)[match.end() :]) != int(match[1], 16):
        raise ValueError("it was changed or cut off: its checksum does not match")
    value = parse_json(data)
    del value["crc32c"]
    return value


def parse_json(data: bytes) -> dict[str, Any]:
    """Return the object that ``data`` is, parsed strictly.

    Raises:
        ValueError: ``data`` is not one strict JSON object.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r:.80} appears twice in one object")
    return members


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number {text:.40} is too large")
    return number
