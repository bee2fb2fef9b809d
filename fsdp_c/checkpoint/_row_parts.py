"""Parts of models of fully_shard(): rows of DTensors.

Note [Rows in files]
A part is a range of the flattened parameter, so it has to be rows of dimension 0. A
parameter that is cut along another dimension, or by tensor parallel ranks, too, is
gathered, and its part are the rows that it would have if only its group cut it.
Loading goes the other way. That communicates, and for a moment each rank has the whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_c._fully_shard.group import Group, groups_in
from fsdp_c._fully_shard.meshes import DataMesh
from fsdp_c._fully_shard.rows import part_of
from fsdp_c._state.parts import ParamPart, Spread, find_parts, whole_part
from fsdp_c._state.sharded_tensors import rows_of
from fsdp_c._units.base import sharded_modules
from fsdp_c._units.cuts import Cut, as_dtensor, has_values, local_of, with_memory
from fsdp_c._units.names import clean_name


@dataclass(frozen=True, eq=False)
class RowPart(ParamPart):
    """A parameter of a group, and the rows that this rank holds.

    Attributes:
        group: The group; ``index`` counts in it.
    """

    group: Group = field(kw_only=True)

    is_rows: ClassVar[bool] = True

    @property
    def shard_group(self) -> ProcessGroup | None:
        """The group over which it is sharded; it may have one rank, or be None."""
        return self._data.shard_group

    @property
    def _data(self) -> DataMesh:
        return self.group.arguments.data

    @cached_property
    def local_shape(self) -> torch.Size:
        """Shape of what the optimizer steps: a DTensor, so of the whole."""
        return self.shape

    @property
    def _cut(self) -> Cut:
        return self.group.params.cuts[self.index]

    @cached_property
    def _is_rows(self) -> bool:
        """Whether the local tensor is the part; see Note [Rows in files]."""
        parallel = self._cut.parallel
        return self._cut.dim == 0 and (
            parallel is None or all(each.is_replicate() for each in parallel[1])
        )

    @property
    def communicates(self) -> bool:
        """Whether :meth:`values` is a collective: the part is not what is here."""
        return not self._is_rows

    @cached_property
    def _own_rows(self) -> tuple[int, int]:
        return rows_of(self.shape[0], self._data.num_shards, self._data.shard_rank)

    def part_in(self, values: Tensor) -> Tensor:
        """Return this rank's part of a DTensor, 1-D, a view if it can be."""
        local = with_memory(local_of(values))
        if self._is_rows:
            return local.reshape(-1)
        data, cut = self._data, self._cut
        placements = data.placements(cut.dim)
        whole = as_dtensor(local, cut.local_shape, data.mesh, placements)
        tensor = whole.full_tensor()
        if cut.parallel is not None:
            tensor = as_dtensor(tensor, cut.shape, *cut.parallel).full_tensor()
        begin, end = self._own_rows
        return tensor[begin:end].reshape(-1)

    def part_of_local(self, values: Tensor) -> Tensor:
        """Return :meth:`part_in` of the DTensor of which this rank has ``values``."""
        cut = self._cut
        return self.part_in(as_dtensor(values, self.shape, cut.mesh, cut.placements))

    def values(self) -> Tensor:
        """Return this rank's part, 1-D, without gradient; a view where it can be."""
        return self.part_in(self.param.detach())

    def as_state(self, values: Tensor) -> Tensor:
        """Return an optimizer's state for this rank's part: a DTensor."""
        if values.is_meta:  # only tried, see OptimLoad
            return values.new_empty(self.shape)
        cut = self._cut
        begin, end = self._own_rows
        local = values.reshape(end - begin, *self.shape[1:])
        if not self._is_rows:
            data = self._data
            rows = as_dtensor(local, self.shape, data.mesh, data.placements(0))
            local = part_of(rows.full_tensor(), cut.mesh, cut.placements)
        return as_dtensor(local, self.shape, cut.mesh, cut.placements)

    @property
    def memory(self) -> Tensor | None:
        """The local tensor, if it is rows and has memory."""
        local = local_of(self.param)
        if not self._is_rows or is_traceable_wrapper_subclass(local):
            return None
        return local if local.is_contiguous() else None

    @property
    def opaque(self) -> Tensor | None:
        """The local tensor, if its class has no values; see has_values()."""
        local = local_of(self.param)
        return None if has_values(local) else local

    def put(self, values: Tensor) -> None:
        """Copy 1-D values of this rank's part into place."""
        with torch.no_grad():
            local_of(self.param).copy_(local_of(self.as_state(values)))


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
    for group, name in groups.items():
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
    param = group.params.current()[index]
    shape = param.shape
    data = group.arguments.data
    begin, end = rows_of(shape[0], data.num_shards, data.shard_rank)
    row_numel = shape[1:].numel()
    whole = whole_part(param, names, None)
    return RowPart(
        **{
            **vars(whole),
            "begin": begin * row_numel,
            "end": end * row_numel,
            "index": index,
            "spread": Spread([shape], None, data.num_shards),
            "group": group,
        }
    )
