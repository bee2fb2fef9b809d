"""Parts of models of fully_shard(): rows of DTensors.

Note [Rows in files]
A part is a range of the flattened parameter, so it has to be rows of dimension 0. A
parameter that is cut along another dimension, or by tensor parallel ranks, too, is
gathered, and its part are the rows that it would have if only its group cut it.
Loading goes the other way. That communicates, and for a moment each rank has the whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_c._fully_shard.group import Group, groups_in
from fsdp_c._fully_shard.rows import part_of
from fsdp_c._fully_shard.ties import settle_ties
from fsdp_c._native import Placement
from fsdp_c._state.parts import Home, ParamPart, Spread, find_parts, whole_part
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.cuts import (
    Cut,
    as_dtensor,
    has_values,
    local_of,
    rows_of,
    with_memory,
)
from fsdp_c._units.names import clean_name


@dataclass(frozen=True, eq=False)
class Rows(Home):
    """Rows of a parameter; the unit may have other elements of it on this rank.

    An optimizer has state for them even on a rank without rows.
    """

    owner: Group | ShardedModule  # of the unit

    is_flat: ClassVar[bool] = False

    @property
    def is_stepped(self) -> bool:
        return True

    def of_whole(self, whole: Tensor) -> Tensor:
        """Return the rows of a whole tensor, 1-D."""
        return whole.reshape(-1)[self.begin : self.end]


def is_in_unit(part: ParamPart) -> bool:
    """Whether the parameter belongs to a unit; else each rank has the whole."""
    return part.module is not None or isinstance(part.home, Rows)


@dataclass(frozen=True, eq=False)
class GroupRows(Rows):
    """Rows of a DTensor of a group."""

    owner: Group
    cut: Cut

    @cached_property
    def communicates(self) -> bool:
        """Whether the local tensor is not the rows; see Note [Rows in files]."""
        parallel = self.cut.parallel
        return self.cut.dim != 0 or (
            parallel is not None and not all(p.is_replicate() for p in parallel[1])
        )

    def part_in(self, values: Tensor) -> Tensor:
        """Return this rank's rows of a DTensor, 1-D, a view if it can be."""
        local = with_memory(local_of(values))
        if not self.communicates:
            return local.reshape(-1)
        data, cut = self.owner.arguments.data, self.cut
        placements = data.placements(cut.dim)
        whole = as_dtensor(local, cut.local_shape, data.mesh, placements)
        tensor = whole.full_tensor()
        if cut.parallel is not None:
            tensor = as_dtensor(tensor, cut.shape, *cut.parallel).full_tensor()
        return self.of_whole(tensor)

    def part_of_local(self, values: Tensor) -> Tensor:
        return self.part_in(self._as_dtensor(values))

    def _as_dtensor(self, local: Tensor) -> DTensor:
        cut = self.cut
        return as_dtensor(local, self.state_shape, cut.mesh, cut.placements)

    def as_state(self, values: Tensor) -> Tensor:
        shape, data = self.state_shape, self.owner.arguments.data
        if values.is_meta:  # only tried, see OptimLoad
            return values.new_empty(shape)
        begin, end = rows_of(shape[0], data.num_shards, data.shard_rank)
        local = values.reshape(end - begin, *shape[1:])
        if self.communicates:
            rows = as_dtensor(local, shape, data.mesh, data.placements(0))
            local = part_of(rows.full_tensor(), self.cut.mesh, self.cut.placements)
        return self._as_dtensor(local)

    @property
    def memory(self) -> Tensor | None:
        """The local tensor, if it is rows and has memory."""
        local = local_of(self.param)
        if self.communicates or is_traceable_wrapper_subclass(local):
            return None
        return local if local.is_contiguous() else None

    @property
    def opaque(self) -> Tensor | None:
        local = local_of(self.param)
        return None if has_values(local) else local

    def _put_back(self, values: Tensor) -> None:
        local_of(self.param).copy_(local_of(self.as_state(values)))


class _RowSpread(Spread):
    """How rows lie over the ranks of a group."""

    def sharded(self, param: int) -> Placement:
        return self.rows(param)


def parts_in(model: nn.Module) -> dict[str, ParamPart]:
    """Return the parts of all parameters of a model of either API, by first name.

    As :func:`fsdp_c._state.parts.find_parts`.

    Raises:
        RuntimeError: A parameter has no memory yet.
        TypeError: ``model`` is not a module.
        ValueError: Nothing in it is sharded, or it holds a part of a group.
    """
    if not isinstance(model, nn.Module) or next(sharded_modules(model), None):
        return find_parts(model)
    groups = groups_in(model)
    return _row_parts(model, groups) if groups else find_parts(model)


def _row_parts(model: nn.Module, groups: Mapping[Group, str]) -> dict[str, ParamPart]:
    where: dict[tuple[nn.Module, str], tuple[Group, int]] = {}
    settle_ties(groups)
    for group, name in groups.items():
        group.params.current()
        group.params.check_memory(f"{name}." if name else "")
        for place in group.params.places:
            where[place.module, place.name] = group, place.param
    sharded: dict[tuple[Group, int], list[str]] = {}
    others: dict[nn.Parameter, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            fqn = clean_name(f"{prefix}.{name}" if prefix else name)
            if (module, name) in where:
                sharded.setdefault(where[module, name], []).append(fqn)
            elif isinstance(param, DTensor):
                raise ValueError(
                    f"parameter {fqn!r} is a DTensor of a group that is not in this "
                    f"{type(model).__name__}: pass the model that contains it"
                )
            elif param is not None:
                others.setdefault(param, []).append(fqn)
    parts = [
        _row_part(group, index, sharded[group, index])
        for group in groups
        for index in range(len(group.params.current()))
        if (group, index) in sharded
    ]
    parts += [whole_part(param, names, None) for param, names in others.items()]
    return {part.fqn: part for part in parts}


def _row_part(group: Group, index: int, names: list[str]) -> ParamPart:
    param, data = group.params.current()[index], group.arguments.data
    shape, row_numel = param.shape, param.shape[1:].numel()
    begin, end = rows_of(shape[0], data.num_shards, data.shard_rank)
    first, last = begin * row_numel, end * row_numel
    cut = group.params.cuts[index]
    home = GroupRows(param, first, last, 0, data.shard_group, shape, group, cut)
    spread = _RowSpread([shape], None, data.num_shards)
    return replace(whole_part(param, names, None), home=home, spread=spread)
