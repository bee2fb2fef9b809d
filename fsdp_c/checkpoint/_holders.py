"""Which ranks of a checkpoint saved which elements: arithmetic on its layout."""

import math
from typing import NamedTuple

from fsdp_c import _native
from fsdp_c.checkpoint._dtypes import dtype_named
from fsdp_c.checkpoint._manifest import Manifest, TensorSpec, UnitSpec, WholeSpec


class Held(NamedTuple):
    """Elements ``[begin, end)`` of a flattened tensor, and the rank that saved them.

    ``part_begin`` and ``part_end`` are all that ``rank`` saved of it.
    """

    begin: int
    end: int
    rank: int
    part_begin: int
    part_end: int


class Holders:
    """The tensors of a checkpoint by name, and who saved them.

    A shared tensor is found under each of its names. The cost of a call does not
    depend on the number of ranks, only on the elements asked for.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._params: dict[str, tuple[UnitSpec, int]] = {}
        self._wholes: dict[str, WholeSpec] = {}
        self._layouts: dict[str, _native.Layout] = {}
        for unit in manifest.units:
            for index, param in enumerate(unit.params):
                for name in param.names:
                    self._params[name] = (unit, index)
        for whole in manifest.wholes:
            for name in whole.names:
                self._wholes[name] = whole

    def spec(self, name: str) -> TensorSpec | None:
        """Return the tensor that is, or was also, called ``name``."""
        if name in self._params:
            unit, index = self._params[name]
            return unit.params[index]
        return self._wholes.get(name)

    def layout(self, unit: UnitSpec) -> _native.Layout:
        """Return the layout of a unit.

        Raises:
            ValueError: It is not the one that the manifest says.
        """
        if unit.name not in self._layouts:
            self._layouts[unit.name] = checked_layout(unit)
        return self._layouts[unit.name]

    def holders(self, name: str, begin: int, end: int) -> list[Held]:
        """Return who saved elements ``[begin, end)`` of a tensor, ascending.

        Raises:
            ValueError: The manifest contradicts itself.
        """
        if begin >= end:
            return []
        if name not in self._params:
            return [Held(begin, end, 0, 0, self._wholes[name].numel)]
        unit, index = self._params[name]
        layout = self.layout(unit)
        pieces = _native.Placement.flat_range(
            layout, unit.params[index].segment, [(index, begin, end)]
        ).pieces
        held = []
        for _, piece_begin, piece_end, shard, _ in pieces:
            part_begin, part_end, _, _ = layout.intersect(index, shard)
            held.append(
                Held(piece_begin, piece_end, unit.ranks[shard], part_begin, part_end)
            )
        return held


def make_layout(unit: UnitSpec) -> _native.Layout:
    """Return the layout of ``unit``; its segments and offsets count if it is placed."""
    params = unit.params
    itemsize, align_params, align_shards = unit.alignment
    return _native.Layout(
        [(p.numel, dtype_named(p.dtype), p.requires_grad) for p in params],
        len(unit.ranks),
        itemsize=itemsize,
        align_params=align_params,
        align_shards=align_shards,
        row_numels=[math.prod(p.shape[1:]) for p in params] if unit.by_rows else None,
        segments=[p.segment for p in params] if unit.is_placed else None,
        offsets=[p.offset for p in params] if unit.is_placed else None,
        shard_numels=[s.shard_numel for s in unit.segments] if unit.is_placed else [],
    )


def checked_layout(unit: UnitSpec) -> _native.Layout:
    """Return the layout of ``unit``.

    Raises:
        ValueError: It is not the one that the manifest says.
    """
    try:
        layout = make_layout(unit)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"unit {unit.name!r:.200}: {error}") from None
    slots = [(param.segment, param.offset, param.numel) for param in unit.params]
    segments = [
        (dtype_named(segment.dtype), segment.requires_grad, segment.shard_numel)
        for segment in unit.segments
    ]
    if layout.slots != slots or segments != [
        (dtype, requires_grad, shard_numel)
        for dtype, requires_grad, _, _, shard_numel, _ in layout.segments
    ]:
        raise ValueError(
            "the manifest contradicts itself: the parameters of unit "
            f"{unit.name!r:.200} are not where its layout has them"
        )
    return layout
