"""The manifest: what a checkpoint holds, and how its parameters were sharded.

It says nothing about single files; with it a reader computes which ranks saved the
elements that it needs (see :mod:`fsdp_c.checkpoint._holders`) and opens only theirs.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeVar, cast

from fsdp_c.checkpoint import _documents
from fsdp_c.checkpoint._dtypes import dtype_named
from fsdp_c.checkpoint._fields import MAX_NUMEL, Fields, anything, integer, string

MANIFEST = "manifest.json"
FORMAT = "fsdp_c.checkpoint"
# In version n of the format each unit has the first n - 1 of these.
_FLAGS: tuple[str, ...] = ("by_rows", "is_placed")
MAX_RANKS = 1 << 20

_T = TypeVar("_T")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the model."""

    name: str  # of its first use, in the unwrapped model
    aliases: tuple[str, ...]  # names of its other uses
    shape: tuple[int, ...]  # of the whole
    dtype: str  # name of its master dtype

    @property
    def names(self) -> tuple[str, ...]:
        """All its names."""
        return (self.name, *self.aliases)

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParamSpec(TensorSpec):
    """One parameter of a unit."""

    requires_grad: bool  # whether it trains
    segment: int  # that it is in
    offset: int  # of its first element in the segment


@dataclass(frozen=True)
class SegmentSpec:
    """One segment: a flat buffer, cut into equal shards."""

    dtype: str
    requires_grad: bool
    shard_numel: int


@dataclass(frozen=True)
class UnitSpec:
    """How one unit was sharded."""

    name: str  # of the wrapped module in the unwrapped model; empty for the root
    # The ranks of the checkpoint that hold its shards, in shard order.
    ranks: tuple[int, ...]
    alignment: tuple[int, bool, bool]  # itemsize, align_params, align_shards
    segments: tuple[SegmentSpec, ...]
    params: tuple[ParamSpec, ...]  # in the unit's order
    # Each parameter is a segment, of which a rank has the rows of torch.chunk.
    by_rows: bool = False
    # Blocks were kept whole: its parameters lie where they say.
    is_placed: bool = False


@dataclass(frozen=True)
class WholeSpec(TensorSpec):
    """A buffer, or a parameter that no unit shards: rank 0 saved all of it."""

    is_param: bool


@dataclass(frozen=True)
class StateSpec:
    """What an optimizer holds for one parameter."""

    sharded: dict[str, str]  # dtype names of its element-wise state, by key
    plain: tuple[str, ...]  # keys of the other state
    # Keys of the element-wise state that had a class of its own on some rank; see
    # fsdp_c.checkpoint._special.
    special: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimSpec:
    """An optimizer."""

    name: str  # of its class
    groups: list[Any]  # encoded; parameters by name
    others: Any  # encoded; state that belongs to no parameter
    states: dict[str, StateSpec]  # by parameter


@dataclass(frozen=True)
class Manifest:
    """A checkpoint. Values called "encoded" are those of fsdp_c.checkpoint._plain."""

    save_id: str
    world_size: int
    units: tuple[UnitSpec, ...]
    wholes: tuple[WholeSpec, ...]
    # Encoded extra state of modules, by key in the state dict.
    modules: dict[str, Any] = field(default_factory=dict)
    optim: OptimSpec | None = None
    scheduler: Any = None  # encoded; None if there was none
    extra: Any = None  # encoded
    has_random_states: bool = False
    has_rank_extra: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0  # of all rank files

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield the parameters of all units, then what rank 0 saved whole."""
        for unit in self.units:
            yield from unit.params
        yield from self.wholes

    def dump(self) -> bytes:
        """Return the manifest as a document."""
        flags = _FLAGS
        while flags and not any(getattr(unit, flags[-1]) for unit in self.units):
            flags = flags[:-1]
        groups: dict[tuple[int, ...], int] = {}
        for unit in self.units:
            groups.setdefault(unit.ranks, len(groups))
        optim = None
        if self.optim is not None:
            optim = {
                **vars(self.optim),
                "states": {
                    name: {k: v for k, v in vars(state).items() if v or k != "special"}
                    for name, state in self.optim.states.items()
                },
            }
        return _documents.dump(
            {
                "format": FORMAT,
                "version": 1 + len(flags),
                "save_id": self.save_id,
                "versions": self.versions,
                "world_size": self.world_size,
                "nbytes": self.nbytes,
                "shard_groups": list(groups),
                "units": [
                    {
                        "name": unit.name,
                        "shard_group": groups[unit.ranks],
                        "alignment": unit.alignment,
                        "segments": [vars(segment) for segment in unit.segments],
                        "params": [vars(param) for param in unit.params],
                        **{flag: getattr(unit, flag) for flag in flags},
                    }
                    for unit in self.units
                ],
                "wholes": [vars(whole) for whole in self.wholes],
                "modules": self.modules,
                "optim": optim,
                "scheduler": self.scheduler,
                "extra": self.extra,
                "has_random_states": self.has_random_states,
                "has_rank_extra": self.has_rank_extra,
            }
        )


def parse_manifest(data: bytes) -> Manifest:
    """Return the manifest of a document.

    Raises:
        ValueError: It is damaged, of another format, or contradicts itself.
    """
    top = Fields(_documents.parse(data), "manifest")
    if top.string("format") != FORMAT:
        raise ValueError("it is not a manifest of fsdp_c.checkpoint")
    version = top.integer("version")
    if not 1 <= version <= 1 + len(_FLAGS):
        raise ValueError(
            f"its format has version {version}; this fsdp_c reads 1 to "
            f"{1 + len(_FLAGS)}"
        )
    world_size = top.integer("world_size", 1, MAX_RANKS)

    def ranks(value: Any, where: str) -> tuple[int, ...]:
        if not isinstance(value, list) or not value:
            raise ValueError(f"{where} is not a list of ranks")
        found = tuple(integer(rank, where, 0, world_size - 1) for rank in value)
        if len(set(found)) != len(found):
            raise ValueError(f"{where} names a rank twice")
        return found

    groups, flags = top.items("shard_groups", ranks), _FLAGS[: version - 1]
    optim = top.any("optim")
    manifest = Manifest(
        save_id=_save_id(top.string("save_id")),
        world_size=world_size,
        units=tuple(top.items("units", partial(_unit, groups, flags))),
        wholes=tuple(top.items("wholes", partial(_record, WholeSpec))),
        modules=top.members("modules", anything),
        optim=None if optim is None else _record(OptimSpec, optim, "manifest.optim"),
        scheduler=top.any("scheduler"),
        extra=top.any("extra"),
        has_random_states=top.boolean("has_random_states"),
        has_rank_extra=top.boolean("has_rank_extra"),
        versions=top.members("versions", string),
        nbytes=top.integer("nbytes"),
    )
    top.end()
    _check_names(manifest)
    return manifest


def _save_id(text: str) -> str:
    if len(text) != 32 or not set(text) <= set("0123456789abcdef"):
        raise ValueError(f"save_id {text!r:.60} is not 32 hexadecimal digits")
    return text


def _record(cls: type[_T], value: Any, where: str) -> _T:
    """Read a dataclass of which the object has all fields, by their types."""
    members = Fields(value, where)
    readers: dict[Any, Callable[[str], Any]] = {
        str: members.string,
        int: members.integer,
        bool: members.boolean,
        tuple[str, ...]: lambda key: tuple(members.items(key, string)),
        tuple[int, ...]: lambda key: tuple(members.items(key, integer)),
        dict[str, StateSpec]: lambda key: members.members(key, _state),
        list[Any]: lambda key: members.items(key, anything),
        Any: members.any,
    }
    types = {each.name: each.type for each in fields(cast("Any", cls))}
    found = {name: readers[kind](name) for name, kind in types.items()}
    members.end()
    if "dtype" in found:
        dtype_named(found["dtype"])
    if math.prod(found.get("shape", ())) > MAX_NUMEL:
        raise ValueError(f"shape {found['shape']} is too large")
    return cls(**found)


def _unit(
    groups: list[tuple[int, ...]], flags: tuple[str, ...], value: Any, where: str
) -> UnitSpec:
    members = Fields(value, where)
    alignment = members.any("alignment")
    if (
        not isinstance(alignment, list)
        or [type(each) for each in alignment] != [int, bool, bool]
        or not 1 <= alignment[0] <= 16
    ):
        raise ValueError(f"{where}.alignment is not [itemsize, params, shards]")
    unit = UnitSpec(
        name=members.string("name"),
        ranks=groups[members.integer("shard_group", 0, len(groups) - 1)],
        alignment=(alignment[0], alignment[1], alignment[2]),
        segments=tuple(members.items("segments", partial(_record, SegmentSpec))),
        params=tuple(members.items("params", partial(_record, ParamSpec))),
        **{flag: members.boolean(flag) for flag in flags},
    )
    members.end()
    for param in unit.params:
        if param.segment >= len(unit.segments):
            raise ValueError(f"parameter {param.name!r} is in no segment of {where}")
    return unit


def _state(value: Any, where: str) -> StateSpec:
    members = Fields(value, where)
    sharded = members.members("sharded", string)
    for name in sharded.values():
        dtype_named(name)
    plain = tuple(members.items("plain", string))
    special = members.items("special", string) if "special" in members else ()
    state = StateSpec(sharded, plain, tuple(special))
    members.end()
    return state


def _check_names(manifest: Manifest) -> None:
    """Check that no two tensors of the model have a name in common."""
    seen: set[str] = set()
    for spec in manifest.tensors():
        for name in spec.names:
            if name in seen:
                raise ValueError(f"name {name!r:.200} is used for two tensors")
            seen.add(name)
    if manifest.optim is not None:
        unknown = manifest.optim.states.keys() - {
            spec.name for spec in manifest.tensors()
        }
        if unknown:
            raise ValueError(
                f"there is optimizer state of {min(unknown)!r:.200}, which is not a "
                "parameter"
            )
