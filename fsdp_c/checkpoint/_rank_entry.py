"""A rank's entry: which tensors are where in the file that this rank wrote."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fsdp_c.checkpoint import _documents
from fsdp_c.checkpoint._checksums import BLOCK_NBYTES, num_blocks
from fsdp_c.checkpoint._dtypes import dtype_named
from fsdp_c.checkpoint._fields import Fields, anything, integer, json_object
from fsdp_c.checkpoint._safetensors import FileTensor

FORMAT = "fsdp_c.checkpoint.rank"


@dataclass(frozen=True)
class Piece:
    """Elements ``[begin, end)`` of a flattened tensor, in one file."""

    dtype: str  # its name
    begin: int
    end: int
    offset: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return (self.end - self.begin) * dtype_named(self.dtype).itemsize


@dataclass(frozen=True)
class RankEntry:
    """What one rank wrote."""

    save_id: str
    rank: int
    nbytes: int  # of the file
    checksums: list[int]  # CRC-32C of the file's blocks
    pieces: dict[str, Piece]  # by key in the safetensors file
    # Encoded optimizer state that is not element-wise, by parameter.
    plain: dict[str, Any] = field(default_factory=dict)
    # Records of tensors of classes of their own, by the keys that pieces have.
    special: dict[str, Any] = field(default_factory=dict)
    random_states: Any = None  # encoded
    rank_extra: Any = None  # encoded

    def dump(self) -> bytes:
        """Return the entry as a document."""
        return _documents.dump(
            {
                "format": FORMAT,
                "save_id": self.save_id,
                "rank": self.rank,
                "nbytes": self.nbytes,
                "block_nbytes": BLOCK_NBYTES,
                "checksums": "".join(f"{value:08x}" for value in self.checksums),
                "pieces": {key: vars(piece) for key, piece in self.pieces.items()},
                "plain": self.plain,
                **({"special": self.special} if self.special else {}),
                "random_states": self.random_states,
                "rank_extra": self.rank_extra,
            }
        )

    def differences(self, tensors: dict[str, FileTensor]) -> list[str]:
        """Return how the header of the file differs from the entry, as sentences."""
        found = [f"its header has no {key!r}" for key in self.pieces.keys() - tensors]
        found += [f"its entry has no {key!r}" for key in tensors.keys() - self.pieces]
        for key, info in tensors.items():
            piece = self.pieces.get(key)
            if piece is not None and (piece.dtype, piece.offset, piece.nbytes) != (
                info.dtype,
                info.begin,
                info.end - info.begin,
            ):
                found.append(f"header and entry differ about {key!r}")
        return found


def parse_rank_entry(data: bytes, *, save_id: str, rank: int) -> RankEntry:
    """Return the entry of a document: that of ``rank``, of the manifest's save.

    Raises:
        ValueError: It is damaged, or of another rank or save.
    """
    top = Fields(_documents.parse(data), "entry")
    if top.string("format") != FORMAT:
        raise ValueError("it is not the entry of a rank")
    if top.string("save_id") != save_id:
        raise ValueError("it belongs to another save than the manifest")
    if top.integer("rank") != rank:
        raise ValueError("it is the entry of another rank")
    nbytes = top.integer("nbytes")
    top.integer("block_nbytes", BLOCK_NBYTES, BLOCK_NBYTES)
    digits = top.string("checksums")
    if len(digits) != 8 * num_blocks(nbytes, BLOCK_NBYTES):
        raise ValueError(f"it has {len(digits)} digits of checksums for {nbytes} bytes")
    if not set(digits) <= set("0123456789abcdef"):
        raise ValueError("its checksums are not hexadecimal digits")
    entry = RankEntry(
        save_id=save_id,
        rank=rank,
        nbytes=nbytes,
        checksums=[int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)],
        pieces=top.members("pieces", partial(_piece, nbytes)),
        plain=top.members("plain", json_object),
        special=top.members("special", _special) if "special" in top else {},
        random_states=top.any("random_states"),
        rank_extra=top.any("rank_extra"),
    )
    top.end()
    return entry


def _special(value: Any, where: str) -> dict[str, Any]:
    fields = Fields(value, where)
    record = {
        "class": fields.string("class"),
        "shape": fields.items("shape", integer),
        "tensors": fields.members("tensors", anything),
        "context": fields.items("context", anything),
    }
    fields.end()
    return record


def _piece(nbytes: int, value: Any, where: str) -> Piece:
    fields = Fields(value, where)
    dtype = fields.string("dtype")
    dtype_named(dtype)
    begin = fields.integer("begin")
    piece = Piece(
        dtype, begin, fields.integer("end", begin), fields.integer("offset", 8)
    )
    fields.end()
    if piece.offset + piece.nbytes > nbytes:
        raise ValueError(f"{where} lies outside the file of {nbytes} bytes")
    return piece


def model_key(name: str) -> str:
    """Return the key of a model's tensor."""
    return f"model/{name}"


def state_key(name: str, state: str) -> str:
    """Return the key of an element-wise optimizer state of parameter ``name``."""
    return f"optim/{state.replace('%', '%25').replace('/', '%2F')}/{name}"
