"""FSDP1's attributes of flat parameters, for programs to read.

Checkpointers walk ``_shard_param_infos`` and ``_param_infos``, averages of weights ask
the handle whether a unit is sharded. All of it is for reading: units are driven by the
native engine. docs/guide/migrate.md lists what has no meaning here, and what to use
instead.
"""

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from fsdp_c import _native
from fsdp_c._torch_compat import (
    FlatParamShardMetadata,
    ParamInfo,
    ShardParamInfo,
    SharedParamInfo,
)
from fsdp_c._units.uses import ParamUse


class _Place(NamedTuple):
    """Where a module has a parameter; modules are not kept alive."""

    name: str
    module: "weakref.ref[nn.Module]"
    module_name: str
    param: int  # in the flat parameter
    is_first: bool


class SegmentFacts(NamedTuple):
    """The layout of one segment, and which part of it this rank holds."""

    rank: int
    shard_numel: int
    slots: tuple[tuple[int, int], ...]  # of each parameter: offset and numel
    own: tuple[tuple[int, int, int, int], ...]  # as Unit.intersect()
    places: tuple[_Place, ...]
    pads_to_world_size: bool  # FSDP1 counts that padding with use_orig_params only
    world_size: int


def find_facts(
    unit: _native.Unit,
    segment: int,
    params: Sequence[int],
    uses: Sequence[ParamUse],
    *,
    rank: int,
    use_orig_params: bool,
) -> SegmentFacts:
    """Return the facts of a segment.

    Args:
        unit: The unit.
        segment: Its segment.
        params: The segment's parameters, in the order of their elements.
        uses: The unit's uses.
        rank: This rank in the sharding group.
        use_orig_params: As in the constructor of FSDP.
    """
    positions = {param: index for index, param in enumerate(params)}
    slots, seen, places = unit.slots, set(), []
    for use, param in zip(uses, unit.param_of_use, strict=True):
        if param in positions:
            prefix = use.fqn.rpartition(".")[0]
            index = positions[param]
            module = weakref.ref(use.module)
            places.append(_Place(use.name, module, prefix, index, index not in seen))
            seen.add(index)
    shard_numel, padded_numel = unit.segments[segment][4:6]
    return SegmentFacts(
        rank,
        shard_numel,
        tuple(slots[param][1:] for param in params),
        tuple(unit.intersect(param, rank) for param in params),
        tuple(places),
        use_orig_params,
        padded_numel // shard_numel if shard_numel else 1,
    )


def _module_of(place: _Place) -> nn.Module:
    module = place.module()
    if module is None:
        raise ReferenceError(
            f"the module of parameter {place.name!r} does not exist any more"
        )
    return module


class FlatParamFacts:
    """The attributes; see torch's FlatParameter for their meaning."""

    # Lightning asks an optimizer's parameters for it.
    _fsdp_flattened = True

    _facts: SegmentFacts
    _shapes: tuple[torch.Size, ...]
    _numels: tuple[int, ...]
    _fqns: tuple[str, ...]

    @property
    def _num_params(self) -> int:
        return len(self._facts.slots)

    @property
    def _param_infos(self) -> tuple[ParamInfo, ...]:
        firsts = [place for place in self._facts.places if place.is_first]
        firsts.sort(key=lambda place: place.param)
        return tuple(
            ParamInfo(place.name, _module_of(place), place.module_name)
            for place in firsts
        )

    @property
    def _shared_param_infos(self) -> tuple[SharedParamInfo, ...]:
        infos = self._param_infos
        return tuple(
            SharedParamInfo(
                place.name, _module_of(place), place.module_name, *infos[place.param]
            )
            for place in self._facts.places
            if not place.is_first
        )

    @property
    def _modules(self) -> set[nn.Module]:
        return {_module_of(place) for place in self._facts.places}

    @property
    def _strides(self) -> tuple[tuple[int, ...], ...]:
        """Those of the views: a flat parameter holds its parameters contiguously."""
        return tuple(
            tuple(accumulate(reversed(shape[1:]), int.__mul__, initial=1))[::-1]
            if shape
            else ()
            for shape in self._shapes
        )

    @property
    def _contiguities(self) -> tuple[bool, ...]:
        return (True,) * self._num_params

    @property
    def _numels_with_padding(self) -> tuple[int, ...]:
        numels, end = [], 0
        for offset, numel in self._facts.slots:
            if offset > end:
                numels.append(offset - end)
            numels.append(numel)
            end = offset + numel
        if self._facts.pads_to_world_size and end % self._facts.world_size:
            numels.append(-end % self._facts.world_size)
        return tuple(numels)

    @property
    def _is_padding_mask(self) -> tuple[bool, ...]:
        mask, end = [], 0
        for offset, numel in self._facts.slots:
            mask += [True] * (offset > end) + [False]
            end = offset + numel
        return (*mask, *[True] * (len(self._numels_with_padding) - len(mask)))

    @property
    def _unpadded_unsharded_size(self) -> torch.Size:
        return torch.Size([sum(self._numels_with_padding)])

    @property
    def _padded_unsharded_size(self) -> torch.Size:
        return torch.Size([self._facts.shard_numel * self._facts.world_size])

    @property
    def _sharded_size(self) -> torch.Size:
        return torch.Size([self._facts.shard_numel])

    @property
    def _shard_numel_padded(self) -> int:
        end = (self._facts.rank + 1) * self._facts.shard_numel
        missing = end - self._unpadded_unsharded_size[0]
        return min(max(missing, 0), self._facts.shard_numel)

    @property
    def _local_shard(self) -> Tensor:
        return cast("Tensor", self).data

    @property
    def _shard_param_infos(self) -> tuple[ShardParamInfo, ...]:
        return tuple(
            ShardParamInfo(True, first, last - first, begin, end - 1)
            if end > begin
            else ShardParamInfo(False, None, None, None, None)
            for begin, end, first, last in self._facts.own
        )

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Return names, shapes and offsets of the parameters in this rank's shard."""
        kept = [
            (index, info)
            for index, info in enumerate(self._shard_param_infos)
            if info.in_shard
        ]
        return FlatParamShardMetadata(
            tuple(self._fqns[index] for index, _ in kept),
            tuple(self._shapes[index] for index, _ in kept),
            tuple(self._strides[index] for index, _ in kept),
            tuple(self._contiguities[index] for index, _ in kept),
            tuple(self._numels[index] for index, _ in kept),
            tuple(
                (cast("int", info.intra_param_start_idx), cast("int", info[-1]))
                for _, info in kept
            ),
        )
