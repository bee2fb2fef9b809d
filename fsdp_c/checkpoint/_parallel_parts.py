"""Parts of FullyShardedDataParallel units with tensor parallel parameters, in files.

Such a unit holds elements of flattened local tensors. Files have rows of the whole
parameters, as those of fully_shard(): see Note [Rows in files].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_c._fully_shard.rows import part_of
from fsdp_c._state.forms import Form, save_tensors
from fsdp_c._state.optim.agreement import packed_value, unpacked_value
from fsdp_c._state.optim.states import ParamState
from fsdp_c._state.parts import ParamPart
from fsdp_c._state.sharded_tensors import rows_of
from fsdp_c._units.cuts import as_dtensor, row_placements
from fsdp_c.checkpoint._ranks import Ranks
from fsdp_c.checkpoint._row_parts import parts_in


@dataclass(frozen=True, eq=False)
class ParallelPart(ParamPart):
    """A parameter of such a unit, and the rows that this rank writes and reads.

    Attributes:
        held: What this rank has of it in its unit.
    """

    held: ParamPart = field(kw_only=True)

    @cached_property
    def is_flat(self) -> bool:
        """Whether the rows are a part of a flat parameter: no."""
        return False

    is_rows: ClassVar[bool] = True
    communicates: ClassVar[bool] = True

    def rows_of_held(self, values: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the rows, 1-D, of values of all ranks' elements. Collective.

        ``values`` are None where a rank holds none.
        """
        form = Form(offload_to_cpu=False)
        saving = (form, (self.held, "", values, dtype))
        ((_, _, whole),) = save_tensors([saving], "a checkpoint's tensors")
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        rows: Tensor = whole.reshape(-1)[self.begin : self.end]
        return rows

    def held_of_rows(self, rows: Tensor) -> Tensor:
        """Return the opposite of :meth:`rows_of_held`. Collective."""
        whole = rows
        mesh = self.over.dtensor_mesh
        if self.shard_group is not None:
            assert mesh is not None
            local = rows.reshape(-1, *self.shape[1:]) if self.numel else rows
            shape = self.shape if self.numel else rows.shape
            placed = as_dtensor(local, shape or local.shape, mesh, row_placements(mesh))
            whole = placed.full_tensor()
        whole = whole.reshape(self.shape)
        if self.cut is not None:
            assert self.cut.parallel is not None
            whole = part_of(whole, *self.cut.parallel)
        return whole.reshape(-1)[self.held.begin : self.held.end]

    def values(self) -> Tensor:
        """Return the rows, 1-D, without gradient."""
        return self.rows_of_held(self.held.values(), self.param.dtype)

    @property
    def memory(self) -> Tensor | None:
        """None: this rank's memory does not hold the rows."""
        return None

    def put(self, values: Tensor) -> None:
        """Copy 1-D values of the rows into place."""
        held = self.held_of_rows(values)
        memory = self.held.memory
        if memory is None:
            self.held.put(held)
            return
        with torch.no_grad():
            self.held.values().copy_(held)
        torch.autograd.graph.increment_version(memory)


def with_parallel_parts(parts: Mapping[str, ParamPart]) -> dict[str, ParamPart]:
    """Return the parts; those of units with tensor parallel parameters as rows."""
    modules = {part.module for part in parts.values() if part.cut is not None}
    return {
        name: _parallel_part(part) if part.module in modules else part
        for name, part in parts.items()
    }


def _parallel_part(part: ParamPart) -> ParallelPart:
    shape = part.shape if part.cut is None else part.cut.shape
    group = part.shard_group
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    begin, end = rows_of(shape[0] if shape else 1, size, rank)
    row_numel = shape[1:].numel()
    facts = {each.name: getattr(part, each.name) for each in fields(part)} | {
        "shape": shape,
        "begin": begin * row_numel,
        "end": end * row_numel,
        "held": part,
    }
    return ParallelPart(**facts)


# Optimizer states ----------------------------------------------------------------

# Of one parameter: dtypes of what has one value per element, and the rest.
_Kinds = tuple[dict[str, torch.dtype], dict[str, Any]]


def with_rows(
    states: Mapping[str, ParamState], places: Mapping[str, ParamPart], ranks: Ranks
) -> dict[str, ParamState]:
    """Return the states that this rank writes: of those parameters its rows.

    Collective if there are any: a rank that holds no element of one has no state.
    """
    found = {name: place for name, place in places.items() if name in states}
    parallel = {n: p for n, p in found.items() if isinstance(p, ParallelPart)}
    result = dict(states)
    if not any(isinstance(place, ParallelPart) for place in places.values()):
        return result
    mine: dict[str, _Kinds] = {
        name: (
            {key: value.dtype for key, value in states[name].sharded.items()},
            {key: packed_value(value) for key, value in states[name].plain.items()},
        )
        for name in parallel
        if states[name].has_state
    }
    theirs = ranks.all_gather(mine)
    for name, place in parallel.items():
        kinds = [each[name] for each in theirs if name in each]
        dtypes = {key: dtype for each, _ in kinds for key, dtype in each.items()}
        plain = {
            key: value for _, each in reversed(kinds) for key, value in each.items()
        }
        held = states[name].sharded
        result[name] = ParamState(
            place,
            {
                key: place.rows_of_held(held.get(key), dtypes[key])
                for key in sorted(dtypes)
            },
            {**{k: unpacked_value(v) for k, v in plain.items()}, **states[name].plain},
            has_state=bool(kinds),
        )
    return result


def rows_to_read(
    model: nn.Module, states: Mapping[str, ParamState]
) -> dict[str, ParamState]:
    """Return the states with rows for those parameters, which are not there yet."""
    places = with_parallel_parts(parts_in(model))
    return {
        name: ParamState(place)
        if isinstance(place := places[name], ParallelPart)
        else state
        for name, state in states.items()
    }


def held_of_rows(
    states: Mapping[str, ParamState], held: Mapping[str, ParamState]
) -> dict[str, ParamState]:
    """Return the states with what the unit holds in the place of rows. Collective.

    On the meta device, to be tried, it is not.
    """
    result = dict(states)
    for name, state in states.items():
        place = state.part
        if not isinstance(place, ParallelPart):
            continue
        part = place.held
        sharded = {
            key: value.new_empty(part.part_numel)
            if value.is_meta
            else place.held_of_rows(value)
            for key, value in sorted(state.sharded.items())
        }
        result[name] = ParamState(part, sharded, state.plain, state.has_state)
        if part.part_numel == 0 and not part.is_flat:  # as if stepped here
            result[name] = held[name]
    return result
