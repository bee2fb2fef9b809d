"""Parts of models of fully_shard(): rows of DTensors.

Note [Rows in files]
A part is a range of the flattened parameter, so it has to be rows of dimension 0. Of a
parameter with other placements (another dimension, a mesh for tensor parallelism) it
is the rows that the parameter would have if only its group sharded it, along dimension
0: DTensor converts it there and back, which communicates and copies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp_c._fully_shard.group import Group, groups_in
from fsdp_c._fully_shard.rows import as_dtensor, local_of
from fsdp_c._state.parts import ParamPart, Spread, find_parts, whole_part
from fsdp_c._state.sharded_tensors import rows_of
from fsdp_c._units.base import sharded_modules
from fsdp_c._units.names import clean_name


@dataclass(frozen=True, eq=False)
class RowPart(ParamPart):
    """A parameter of a group, and the rows that this rank holds.

    Attributes:
        group: The group; ``index`` counts in it.
    """

    group: Group

    @property
    def is_in_unit(self) -> bool:
        """Whether a unit has it: yes."""
        return True

    @property
    def shard_group(self) -> ProcessGroup:
        """The group over which it is sharded; it may have one rank."""
        return self.group.arguments.shard_group

    @cached_property
    def local_shape(self) -> torch.Size:
        """Shape of what the optimizer steps: a DTensor, so of the whole."""
        return self.shape

    @cached_property
    def _mesh(self) -> DeviceMesh:
        param: nn.Parameter = self.param
        assert isinstance(param, DTensor)
        return param.device_mesh

    @cached_property
    def _own_placements(self) -> tuple[Placement, ...]:
        param: nn.Parameter = self.param
        assert isinstance(param, DTensor)
        return tuple(param.placements)

    @cached_property
    def _row_placements(self) -> tuple[Placement, ...]:
        """See Note [Rows in files]."""
        mesh = self._mesh
        by_rows: list[Placement] = [Replicate()] * mesh.ndim
        of_group = self.shard_group.group_name
        for dim in range(mesh.ndim):
            if mesh.get_group(dim).group_name == of_group:
                by_rows[dim] = Shard(0)
        return tuple(by_rows)

    def part_in(self, values: Tensor) -> Tensor:
        """Return this rank's part of a DTensor, 1-D, a view if it can be."""
        assert isinstance(values, DTensor)
        if self._own_placements != self._row_placements:
            values = values.redistribute(placements=self._row_placements)
        return local_of(values).reshape(-1)

    def values(self) -> Tensor:
        """Return this rank's part, 1-D, without gradient; a view where it can be."""
        return self.part_in(self.param.detach())

    def as_state(self, values: Tensor) -> Tensor:
        """Return an optimizer's state for this rank's part: a DTensor."""
        if values.is_meta:  # only tried, see OptimLoad
            return values.new_empty(self.shape)
        num_rows = self.shape[0]
        begin, end = rows_of(num_rows, self.shard_group.size(), self.shard_group.rank())
        local = values.reshape(end - begin, *self.shape[1:])
        state = as_dtensor(local, self.shape, self._mesh, self._row_placements)
        if self._own_placements != self._row_placements:
            state = state.redistribute(placements=self._own_placements)
        return state

    @property
    def memory(self) -> Tensor | None:
        """The local tensor, if it is rows."""
        if self._own_placements != self._row_placements:
            return None
        local = local_of(self.param)
        return local if local.is_contiguous() else None

    def put(self, values: Tensor) -> None:
        """Copy 1-D values of this rank's part into place."""
        with torch.no_grad():
            self.param.copy_(self.as_state(values))


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
        group.check_memory(f"{name}." if name else "")
        for place in group.places:
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
        for index in range(len(group.params()))
        if (group, index) in sharded
    ]
    parts += [whole_part(param, names, None) for param, names in others.items()]
    return {part.fqn: part for part in parts}


def _row_part(group: Group, index: int, names: list[str]) -> ParamPart:
    param = group.params()[index]
    shape = param.shape
    shards = group.arguments.shard_group
    begin, end = rows_of(shape[0], shards.size(), shards.rank())
    row_numel = shape[1:].numel()
    whole = whole_part(param, names, None)
    return RowPart(
        **{
            **vars(whole),
            "begin": begin * row_numel,
            "end": end * row_numel,
            "index": index,
            "spread": Spread([shape], None, shards.size()),
            "group": group,
        }
    )
