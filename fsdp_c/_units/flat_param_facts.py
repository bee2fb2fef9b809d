"""FSDP1's attributes of flat parameters, for programs to read.

Checkpointers walk ``_shard_param_infos`` and ``_param_infos``, averages of weights ask
the handle whether a unit is sharded. All of it is for reading: units are driven by the
native engine. docs/guide/migrate.md lists what has no meaning here, and what to use
instead.
"""

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

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

    def info(self) -> ParamInfo:
        module = self.module()
        if module is None:
            raise ReferenceError(
                f"the module of parameter {self.name!r} does not exist any more"
            )
        return ParamInfo(self.name, module, self.module_name)


class SegmentFacts(NamedTuple):
    """What FlatParamFacts shows, each under its name with an underscore before it."""

    places: tuple[_Place, ...]
    own: tuple[tuple[int, int, int, int], ...]  # as Unit.intersect()
    world_size: int
    num_params: int
    fqns: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    numels: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    contiguities: tuple[bool, ...]
    numels_with_padding: tuple[int, ...]
    is_padding_mask: tuple[bool, ...]
    unpadded_unsharded_size: torch.Size
    padded_unsharded_size: torch.Size
    sharded_size: torch.Size
    shard_numel_padded: int
    shard_param_infos: tuple[ShardParamInfo, ...]


def find_facts(
    unit: _native.Unit,
    segment: int,
    uses: Sequence[ParamUse],
    shapes: Sequence[torch.Size],
    *,
    rank: int,
    use_orig_params: bool,
) -> SegmentFacts:
    """Return what the flat parameter of a segment shows.

    ``uses`` and ``shapes`` are the unit's; ``rank`` is this one in the sharding group.
    """
    slots = unit.slots
    params = [p for p, slot in enumerate(slots) if slot[0] == segment]
    params.sort(key=lambda p: slots[p][1])
    positions = {param: index for index, param in enumerate(params)}
    firsts: dict[int, int] = {}
    places = []
    for number, (use, param) in enumerate(zip(uses, unit.param_of_use, strict=True)):
        if param in positions:
            is_first = firsts.setdefault(param, number) == number
            prefix = use.fqn.rpartition(".")[0]
            module = weakref.ref(use.module)
            places.append(_Place(use.name, module, prefix, positions[param], is_first))
    its_shapes = tuple(shapes[firsts[param]] for param in params)
    shard_numel, padded_numel = unit.segments[segment][4:6]
    world_size = padded_numel // shard_numel if shard_numel else 1
    numels: list[int] = []
    mask: list[bool] = []
    end = 0
    for param in params:
        _, offset, numel = slots[param]
        if offset > end:
            numels.append(offset - end)
            mask.append(True)
        numels.append(numel)
        mask.append(False)
        end = offset + numel
    if use_orig_params and end % world_size:  # FSDP1 counts that padding with it only
        numels.append(-end % world_size)
        mask.append(True)
    own = tuple(unit.intersect(param, rank) for param in params)
    missing = (rank + 1) * shard_numel - sum(numels)
    return SegmentFacts(
        places=tuple(places),
        own=own,
        world_size=world_size,
        num_params=len(params),
        fqns=tuple(uses[firsts[param]].fqn for param in params),
        shapes=its_shapes,
        numels=tuple(shape.numel() for shape in its_shapes),
        # A flat parameter holds its parameters contiguously.
        strides=tuple(torch.empty(s, device="meta").stride() for s in its_shapes),
        contiguities=(True,) * len(params),
        numels_with_padding=tuple(numels),
        is_padding_mask=tuple(mask),
        unpadded_unsharded_size=torch.Size([sum(numels)]),
        padded_unsharded_size=torch.Size([padded_numel]),
        sharded_size=torch.Size([shard_numel]),
        shard_numel_padded=min(max(missing, 0), shard_numel),
        shard_param_infos=tuple(
            ShardParamInfo(True, first, last - first, begin, end - 1)
            if end > begin
            else ShardParamInfo(False, None, None, None, None)
            for begin, end, first, last in own
        ),
    )


class FlatParamFacts:
    """The attributes, to read; see torch's FlatParameter for their meaning."""

    # Lightning asks an optimizer's parameters for it.
    _fsdp_flattened = True

    _facts: SegmentFacts
    _fqns: tuple[str, ...]
    _own: tuple[tuple[int, int, int, int], ...]
    _padded_unsharded_size: torch.Size
    _sharded_size: torch.Size
    _world_size: int

    @property
    def _param_infos(self) -> tuple[ParamInfo, ...]:
        firsts = [place for place in self._facts.places if place.is_first]
        firsts.sort(key=lambda place: place.param)
        return tuple(place.info() for place in firsts)

    @property
    def _shared_param_infos(self) -> tuple[SharedParamInfo, ...]:
        infos = self._param_infos
        return tuple(
            SharedParamInfo(*place.info(), *infos[place.param])
            for place in self._facts.places
            if not place.is_first
        )

    @property
    def _modules(self) -> set[nn.Module]:
        return {place.info().module for place in self._facts.places}

    @property
    def _local_shard(self) -> Tensor:
        return cast("Tensor", self).data

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Return names, shapes and offsets of the parameters in this rank's shard."""
        facts = self._facts
        kept = [i for i, (begin, end, _, _) in enumerate(facts.own) if end > begin]

        def of_kept(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(values[index] for index in kept)

        return FlatParamShardMetadata(
            of_kept(facts.fqns),
            of_kept(facts.shapes),
            of_kept(facts.strides),
            of_kept(facts.contiguities),
            of_kept(facts.numels),
            of_kept([info[3:] for info in facts.shard_param_infos]),
        )


for _name in SegmentFacts._fields:
    setattr(FlatParamFacts, f"_{_name}", property(attrgetter(f"_facts.{_name}")))
