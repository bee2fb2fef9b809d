"""The safetensors format: headers, written and strictly read.

A file is 8 bytes (little-endian length of the header), a JSON header, then the
tensors without gaps. The file is never mapped, so one that is cut off while it is
read is an error, not a signal.

Source:
    The format of the safetensors library, version 0.8.
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_c.checkpoint import _documents
from fsdp_c.checkpoint._dtypes import dtype_named
from fsdp_c.checkpoint._fields import MAX_NUMEL, Fields, integer

_LENGTH_NBYTES = 8
_ALIGNMENT_NBYTES = 64
MAX_HEADER_NBYTES = 100_000_000


@dataclass(frozen=True)
class FileTensor:
    """One tensor in a file; ``begin`` and ``end`` are bytes from its start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def make_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: dict[str, str],
) -> tuple[bytes, dict[str, FileTensor]]:
    """Return the first bytes of a file, and where its tensors will lie.

    ``tensors`` are (name, dtype name, shape), in the order of the file.

    Raises:
        ValueError: Two tensors have one name, or the header is too large.
    """
    members: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    places: dict[str, FileTensor] = {}
    offset = 0
    for name, dtype, shape in tensors:
        if name in members or name == "__metadata__":
            raise ValueError(f"there are two tensors {name!r} for one file")
        end = offset + math.prod(shape) * dtype_named(dtype).itemsize
        members[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        places[name] = FileTensor(dtype, shape, offset, end)
        offset = end
    text = json.dumps(members, separators=(",", ":")).encode("ascii")
    text += b" " * (-(len(text) + _LENGTH_NBYTES) % _ALIGNMENT_NBYTES)
    if len(text) > MAX_HEADER_NBYTES:
        raise ValueError(f"a header of {len(text)} bytes is too large for safetensors")
    start = _LENGTH_NBYTES + len(text)
    return len(text).to_bytes(_LENGTH_NBYTES, "little") + text, {
        name: FileTensor(each.dtype, each.shape, each.begin + start, each.end + start)
        for name, each in places.items()
    }


def read_header(descriptor: int) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Return the tensors and the metadata of an open file.

    Raises:
        ValueError: It is not a safetensors file, or damaged.
        OSError: It cannot be read.
    """
    nbytes = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, _LENGTH_NBYTES, 0), "little")
    if nbytes < _LENGTH_NBYTES or length > min(
        MAX_HEADER_NBYTES, nbytes - _LENGTH_NBYTES
    ):
        raise ValueError(f"its header does not fit in its {nbytes} bytes")
    text = os.pread(descriptor, length, _LENGTH_NBYTES)
    if not text.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    members = _documents.parse_json(text)
    metadata = members.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(
        not isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError("its metadata values are not strings")
    start = _LENGTH_NBYTES + length
    tensors = {
        name: _info(start, each, f"tensor {name!r:.200}")
        for name, each in members.items()
    }
    end = start
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):
        if info.begin != end:
            raise ValueError("its tensors overlap or leave gaps")
        end = info.end
    if end != nbytes:
        raise ValueError(f"it has {nbytes} bytes where its header says {end}")
    return tensors, metadata


def _info(start: int, value: object, where: str) -> FileTensor:
    fields = Fields(value, where)
    dtype = fields.string("dtype")
    shape = fields.items("shape", integer)
    places = fields.items("data_offsets", integer)
    fields.end()
    numel = math.prod(shape)
    nbytes = numel * dtype_named(dtype).itemsize
    if numel > MAX_NUMEL or len(places) != 2 or places[1] - places[0] != nbytes:
        raise ValueError(
            f"{where}: its offsets {places} are not those of shape {shape}"
        )
    return FileTensor(dtype, tuple(shape), places[0] + start, places[1] + start)
