"""Plans which bytes of which rank files this rank reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fsdp_c.checkpoint._dtypes import dtype_name, dtype_named
from fsdp_c.checkpoint._holders import Held
from fsdp_c.checkpoint._manifest import TensorSpec
from fsdp_c.checkpoint._plain import tensor_keys
from fsdp_c.checkpoint._rank_entry import Piece, model_key, state_key
from fsdp_c.checkpoint._reads import Read
from fsdp_c.checkpoint._source import RankSource, Source


@dataclass
class Target:
    """Elements ``[begin, end)`` of a flattened tensor, and where they go."""

    what: str  # its name in messages
    names: tuple[str, ...]  # all its names in the model
    shape: tuple[int, ...]  # of the whole tensor
    begin: int
    end: int
    tensor: Tensor  # 1-D

    def misfits(
        self, shape: tuple[int, ...], dtype: str | None, where: str, remedy: str = ""
    ) -> list[str]:
        """Return why what ``where`` has of it cannot be loaded.

        ``dtype`` is None if any will do; ``remedy`` is for another one.
        """
        found = []
        if shape != self.shape:
            found.append(
                f"{self.what} has shape {list(shape)} in {where} and "
                f"{list(self.shape)} in the model"
            )
        own = dtype_name(self.tensor.dtype, self.what)
        if dtype not in (None, own):
            found.append(
                f"{self.what} is {dtype} in {where} and {own} in the model{remedy}"
            )
        return found

    def plan(self, source: Source, spec: TensorSpec) -> None:
        """Plan the reads that fill it; problems go to the source."""
        plan_reads(source, self.what, spec, (self.begin, self.end), self.tensor)


def plan_parameters(
    source: Source, targets: Sequence[Target]
) -> tuple[list[str], list[str]]:
    """Plan what fills the model's parameters and buffers.

    Returns:
        Names that only the model has, and names that only the checkpoint has.
    """
    missing = []
    used: set[str] = set()
    for target in targets:
        found = {
            spec.name: spec
            for name in target.names
            if (spec := source.holders.spec(name)) is not None
        }
        used.update(found)
        if not found:
            missing.append(target.names[0])
            continue
        spec = next(iter(found.values()))
        problems = target.misfits(spec.shape, spec.dtype, "the checkpoint")
        if len(found) > 1:
            problems.append(
                f"{target.what} is one tensor in the model, with the names "
                f"{list(target.names)}, and {len(found)} in the checkpoint"
            )
        source.problems += problems
        if not problems:
            target.plan(source, spec)
    names = [spec.name for spec in source.manifest.tensors()]
    return missing, [name for name in names if name not in used]


class Part(NamedTuple):
    """Elements ``[begin, end)`` of a flattened tensor, in one rank's file."""

    rank: RankSource
    piece: Piece
    begin: int
    end: int

    @property
    def bytes(self) -> tuple[int, int]:
        """The bytes ``[begin, end)`` of the elements in the file."""
        itemsize = dtype_named(self.piece.dtype).itemsize
        first = self.piece.offset - self.piece.begin * itemsize
        return first + self.begin * itemsize, first + self.end * itemsize

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes of the elements, in whole elements."""
        return self.rank.reads.chunks(*self.bytes)

    def plan_read(self, what: str, first: int, values: Tensor) -> None:
        """Plan to read the elements into ``values``, those from ``first`` on."""
        target = values[self.begin - first : self.end - first]
        dtype = dtype_named(self.piece.dtype)
        self.rank.reads.reads.append(Read(what, *self.bytes, dtype, target))


def find_ranks(
    source: Source, what: str, spec: TensorSpec, elements: tuple[int, int]
) -> Iterator[tuple[Held, RankSource]]:
    """Yield who saved elements of a tensor, ascending.

    One whose entry is damaged is a problem of the source.
    """
    for held in source.holders.holders(spec.name, *elements):
        rank = source.rank(held.rank)
        if rank is None:
            source.problems.append(f"{what} is lost with the entry of rank {held.rank}")
        else:
            yield held, rank


def find_part(
    source: Source, what: str, held: Held, rank: RankSource, key: str, dtype: str
) -> Part | None:
    """Return where a rank's elements are; a problem if not where the manifest says."""
    piece = rank.entry.pieces.get(key)
    saved = (held.part_begin, held.part_end, dtype)
    if piece is None or (piece.begin, piece.end, piece.dtype) != saved:
        source.problems.append(
            f"the entry of rank {held.rank} has no {dtype} elements "
            f"[{held.part_begin}, {held.part_end}) of {what}, which the manifest lists"
        )
        return None
    return Part(rank, piece, held.begin, held.end)


def find_parts(
    source: Source,
    what: str,
    spec: TensorSpec,
    elements: tuple[int, int],
    state: tuple[str, str] | None = None,
) -> list[Part]:
    """Return where elements of a tensor are, ascending; problems go to the source.

    ``state`` is (key, dtype) of an optimizer state, of which ``spec`` is the parameter.
    """
    key, dtype = model_key(spec.name), spec.dtype
    if state is not None:
        key, dtype = state_key(spec.name, state[0]), state[1]
    parts = []
    for held, rank in find_ranks(source, what, spec, elements):
        if key in rank.entry.special:
            source.problems.append(
                f"rank {held.rank} saved {what} as a "
                f"{rank.entry.special[key]['class']}: only load() can read it, into "
                "the class that saved it"
            )
            continue
        part = find_part(source, what, held, rank, key, dtype)
        if part is not None:
            parts.append(part)
    return parts


def plan_reads(
    source: Source,
    what: str,
    spec: TensorSpec,
    elements: tuple[int, int],
    values: Tensor,
    state: tuple[str, str] | None = None,
) -> None:
    """Add the reads that fill ``values``; as :func:`find_parts`."""
    for part in find_parts(source, what, spec, elements, state):
        part.plan_read(what, elements[0], values)


class Plain(NamedTuple):
    """Encoded optimizer state that is not element-wise, and who saved it."""

    values: dict[str, Any]
    rank: RankSource


def find_plain(
    source: Source,
    spec: TensorSpec,
    keys: Sequence[str],
    elements: tuple[int, int],
    *,
    is_of_whole: bool,
) -> Plain | None:
    """Return the plain state of a parameter for a rank that holds ``elements``.

    It comes from the rank that saved exactly these elements. Else it comes from any
    rank that saved some of them, if these agree and it has no tensor, unless the state
    ``is_of_whole``, whatever a rank holds of the parameter. Rank 0 saved that of an
    empty parameter. Problems go to the source.
    """
    found: list[tuple[Plain, Held]] = []
    holders = source.holders.holders(spec.name, *elements)
    for held in holders if spec.numel else [Held(0, 0, 0, 0, 0)]:
        rank = source.rank(held.rank)
        if rank is None:
            return None  # a problem already
        values = rank.entry.plain.get(spec.name)
        if values is None or values.keys() != set(keys):
            source.problems.append(
                f"the entry of rank {held.rank} has no optimizer state {list(keys)} of "
                f"{spec.name!r}, which the manifest lists"
            )
            return None
        found.append((Plain(values, rank), held))
    first, held = found[0]
    if (held.part_begin, held.part_end) == elements:
        return first
    for key in keys:
        values_of_rank = [plain.values[key] for plain, _ in found]
        what = f"optimizer state {key!r} of {spec.name!r}"
        if tensor_keys(values_of_rank):
            if is_of_whole:
                continue
            source.problems.append(
                f"{what} is not element-wise: it was saved for elements "
                f"[{held.part_begin}, {held.part_end}) and not for "
                f"[{elements[0]}, {elements[1]}); load it with the number of ranks and "
                "the wrapping that saved it, or load without the optimizer"
            )
        elif any(value != values_of_rank[0] for value in values_of_rank):
            source.problems.append(
                f"{what} differs between the ranks that saved it: load it with as many "
                "ranks as saved it"
            )
    return first
