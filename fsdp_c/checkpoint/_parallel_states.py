"""Optimizer states of :class:`fsdp_c.checkpoint._parallel_parts.ParallelPart`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_c._state.optim.agreement import packed_value, unpacked_value
from fsdp_c._state.optim.states import ParamState
from fsdp_c._state.parts import ParamPart
from fsdp_c.checkpoint._parallel_parts import ParallelPart, with_parallel_parts
from fsdp_c.checkpoint._ranks import Ranks
from fsdp_c.checkpoint._row_parts import parts_in

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
