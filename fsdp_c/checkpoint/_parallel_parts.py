"""Parts of FullyShardedDataParallel units with tensor parallel parameters, in files.

Such a unit holds elements of flattened local tensors. Files have rows of the whole
parameters, as those of fully_shard(): see Note [Rows in files].
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_c._fully_shard.row_parts import Rows, parts_in
from fsdp_c._fully_shard.rows import part_of
from fsdp_c._state.forms import Form, save_tensors
from fsdp_c._state.optim.agreement import packed_value, unpacked_value
from fsdp_c._state.optim.states import ParamState
from fsdp_c._state.parts import ParamPart
from fsdp_c._units.base import ShardedModule
from fsdp_c._units.cuts import as_dtensor, row_placements, rows_of
from fsdp_c.checkpoint._memory import was_written
from fsdp_c.checkpoint._ranks import Ranks


@dataclass(frozen=True, eq=False)
class ParallelRows(Rows):
    """Rows of a parameter of such a unit."""

    owner: ShardedModule
    held: ParamPart  # what this rank has of it in its unit

    @property
    def communicates(self) -> bool:
        return True

    def of_held(self, values: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the rows, 1-D, of values of all ranks' elements. Collective.

        ``values`` are None where a rank holds none.
        """
        form = Form(offload_to_cpu=False)
        saving = (form, (self.held, "", values, dtype))
        ((_, _, whole),) = save_tensors([saving], "a checkpoint's tensors")
        return self.of_whole(
            whole.full_tensor() if isinstance(whole, DTensor) else whole
        )

    def to_held(self, rows: Tensor) -> Tensor:
        """Return the opposite of :meth:`of_held`. Collective."""
        whole, shape, held = rows, self.state_shape, self.held
        if self.shard_group is not None:
            mesh = self.owner.dtensor_mesh
            if shape.numel():
                rows = rows.reshape(-1, *shape[1:])
            seen = shape or torch.Size([1]) if shape.numel() else rows.shape
            whole = as_dtensor(rows, seen, mesh, row_placements(mesh)).full_tensor()
        whole = whole.reshape(shape)
        if held.cut is not None:
            assert held.cut.parallel is not None
            whole = part_of(whole, *held.cut.parallel)
        return whole.reshape(-1)[held.begin : held.end]

    def values(self) -> Tensor:
        return self.of_held(self.held.home.values(), self.param.dtype)

    @property
    def memory(self) -> Tensor | None:
        """None: this rank's memory does not hold the rows."""
        return None

    def _put_back(self, values: Tensor) -> None:
        self.held.home.put(self.to_held(values))
        was_written(self.held.param)  # also where nothing of it is


def parts_for_files(model: nn.Module) -> dict[str, ParamPart]:
    """Return all parts; those of units with tensor parallel parameters as rows."""
    parts = parts_in(model)
    modules = {part.module for part in parts.values() if part.cut is not None}
    return {
        name: _parallel_part(part, part.module)
        if part.module in modules and part.module is not None
        else part
        for name, part in parts.items()
    }


def _parallel_part(part: ParamPart, module: ShardedModule) -> ParamPart:
    shape = part.shape if part.cut is None else part.cut.shape
    group, row_numel = part.shard_group, shape[1:].numel()
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    begin, end = (
        row * row_numel for row in rows_of(shape[0] if shape else 1, size, rank)
    )
    rows = ParallelRows(part.param, begin, end, 0, group, shape, module, part)
    return replace(part, shape=shape, home=rows)


# Optimizer states ----------------------------------------------------------------

# Of one parameter: dtypes of what has one value per element, and the rest.
_Kinds = tuple[dict[str, torch.dtype], dict[str, Any]]


def _rows_of(part: ParamPart) -> ParallelRows | None:
    return part.home if isinstance(part.home, ParallelRows) else None


def with_rows(
    states: Mapping[str, ParamState], places: Mapping[str, ParamPart], ranks: Ranks
) -> dict[str, ParamState]:
    """Return the states that this rank writes: of those parameters its rows.

    Collective if there are any: a rank that holds no element of one has no state.
    """
    result = dict(states)
    if not any(map(_rows_of, places.values())):
        return result
    homes = {name: _rows_of(places[name]) for name in states}
    parallel = {name: home for name, home in homes.items() if home is not None}
    mine: dict[str, _Kinds] = {
        name: (
            {key: value.dtype for key, value in states[name].sharded.items()},
            {key: packed_value(value) for key, value in states[name].plain.items()},
        )
        for name in parallel
        if states[name].has_state
    }
    theirs = ranks.all_gather(mine)
    for name, home in parallel.items():
        kinds = [each[name] for each in theirs if name in each]
        dtypes = {key: dtype for each, _ in kinds for key, dtype in each.items()}
        plain = {
            key: value for _, each in reversed(kinds) for key, value in each.items()
        }
        held = states[name].sharded
        result[name] = ParamState(
            places[name],
            {key: home.of_held(held.get(key), dtypes[key]) for key in sorted(dtypes)},
            {**{k: unpacked_value(v) for k, v in plain.items()}, **states[name].plain},
            has_state=bool(kinds),
        )
    return result


def rows_to_read(
    model: nn.Module, states: Mapping[str, ParamState]
) -> dict[str, ParamState]:
    """Return the states with rows for those parameters, which are not there yet."""
    places = parts_for_files(model)
    return {
        name: ParamState(places[name]) if _rows_of(places[name]) else state
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
        home = _rows_of(state.part)
        if home is None:
            continue
        part = home.held
        sharded = {
            key: value.new_empty(part.part_numel)
            if value.is_meta
            else home.to_held(value)
            for key, value in sorted(state.sharded.items())
        }
        result[name] = ParamState(part, sharded, state.plain, state.has_state)
        if not part.is_stepped:  # what the optimizer made for no element may stay
            result[name] = held[name]
    return result
