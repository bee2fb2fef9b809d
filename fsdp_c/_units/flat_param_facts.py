"""FSDP1's attributes of flat parameters, for programs to read.

Checkpointers walk ``_shard_param_infos`` and ``_param_infos``, averages of weights ask
the handle whether a unit is sharded. All of it is for reading: units are driven by the
native engine. docs/guide/migrate.md lists what has no meaning here, and what to use
instead.
"""

import weakref
from collections.abc import Sequence
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


def find_facts(
    unit: _native.Unit,
    segment: int,
    uses: Sequence[ParamUse],
    *,
    rank: int,
    use_orig_params: bool,
) -> dict[str, Any]:
    """Return the attributes of the flat parameter of a segment.

    ``uses`` are the unit's; ``rank`` is this one in the sharding group.
    """
    slots = unit.slots
    firsts: dict[int, ParamUse] = {}
    for use in uses:
        if slots[use.slot][0] == segment:
            firsts.setdefault(use.slot, use)
    # What has no elements stands first, where others begin at the same place.
    params = sorted(firsts, key=lambda param: slots[param][1:])
    positions = {param: position for position, param in enumerate(params)}
    shapes = tuple(firsts[param].shape for param in params)
    shard_numel, padded_numel = unit.segments[segment][4:6]
    world_size = padded_numel // shard_numel if shard_numel else 1
    extents: list[tuple[int, bool]] = []  # numels, and whether they are padding
    end = 0
    for param in params:
        _, offset, numel = slots[param]
        if offset > end:
            extents.append((offset - end, True))
        extents.append((numel, False))
        end = offset + numel
    if use_orig_params and end % world_size:  # FSDP1 counts that padding with it only
        extents.append((-end % world_size, True))
    total = sum(numel for numel, _ in extents)
    own = tuple(unit.intersect(param, rank) for param in params)
    missing = (rank + 1) * shard_numel - total
    return {
        "_places": tuple(
            _Place(
                use.name,
                weakref.ref(use.module),
                use.fqn.rpartition(".")[0],
                positions[use.slot],
                use is firsts[use.slot],
            )
            for use in uses
            if use.slot in firsts
        ),
        "_own": own,
        "_world_size": world_size,
        "_num_params": len(params),
        "_fqns": tuple(firsts[param].fqn for param in params),
        "_shapes": shapes,
        "_numels": tuple(shape.numel() for shape in shapes),
        # A flat parameter holds its parameters contiguously.
        "_strides": tuple(torch.empty(s, device="meta").stride() for s in shapes),
        "_contiguities": (True,) * len(params),
        "_numels_with_padding": tuple(numel for numel, _ in extents),
        "_is_padding_mask": tuple(is_padding for _, is_padding in extents),
        "_unpadded_unsharded_size": torch.Size([total]),
        "_padded_unsharded_size": torch.Size([padded_numel]),
        "_sharded_size": torch.Size([shard_numel]),
        "_shard_numel_padded": min(max(missing, 0), shard_numel),
        "_shard_param_infos": tuple(
            ShardParamInfo(True, first, last - first, begin, end - 1)
            if end > begin
            else ShardParamInfo(False, None, None, None, None)
            for begin, end, first, last in own
        ),
    }


def _is_same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and (
        (one.data_ptr(), one.device, one.shape, one.dtype)
        == (other.data_ptr(), other.device, other.shape, other.dtype)
    )


class FlatParamFacts:
    """The attributes, to read; see torch's FlatParameter for their meaning."""

    # Lightning asks an optimizer's parameters for it.
    _fsdp_flattened = True

    _seen_shard: Tensor | None = None
    _facts: dict[str, Any]
    # Some of them:
    _places: tuple[_Place, ...]
    _fqns: tuple[str, ...]
    _own: tuple[tuple[int, int, int, int], ...]  # as Unit.intersect()
    _padded_unsharded_size: torch.Size
    _sharded_size: torch.Size
    _world_size: int

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_facts", ()):
            raise AttributeError(
                f"{name} of a flat parameter is read-only: the native engine owns it"
            )
        super().__setattr__(name, value)

    def take_facts(self, facts: dict[str, Any]) -> None:
        self._facts = facts
        vars(self).update(facts)

    @property
    def _param_infos(self) -> tuple[ParamInfo, ...]:
        firsts = [place for place in self._places if place.is_first]
        firsts.sort(key=lambda place: place.param)
        return tuple(place.info() for place in firsts)

    @property
    def _shared_param_infos(self) -> tuple[SharedParamInfo, ...]:
        infos = self._param_infos
        return tuple(
            SharedParamInfo(*place.info(), *infos[place.param])
            for place in self._places
            if not place.is_first
        )

    @property
    def _modules(self) -> set[nn.Module]:
        return {place.info().module for place in self._places}

    @property
    def _local_shard(self) -> Tensor:
        """The shard, without gradient: the same object while it is where it was."""
        shard = cast("Tensor", self).data
        if not _is_same(self._seen_shard, shard):
            self._seen_shard = shard
        assert self._seen_shard is not None
        return self._seen_shard

    @_local_shard.setter
    def _local_shard(self, shard: Tensor) -> None:
        """Take what programs set it to after a move: ``data``, and nothing else."""
        if not _is_same(shard, cast("Tensor", self).data):
            raise AttributeError(
                "_local_shard of a flat parameter is its data: move it by "
                "_handle.flat_param_to(), or copy values into it"
            )
        self._seen_shard = shard

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Return names, shapes and offsets of the parameters in this rank's shard."""
        kept = [i for i, (begin, end, _, _) in enumerate(self._own) if end > begin]

        def of_kept(name: str) -> tuple[Any, ...]:
            return tuple(self._facts[name][index] for index in kept)

        return FlatParamShardMetadata(
            of_kept("_fqns"),
            of_kept("_shapes"),
            of_kept("_strides"),
            of_kept("_contiguities"),
            of_kept("_numels"),
            tuple(info[3:] for info in of_kept("_shard_param_infos")),
        )
