"""This rank's parts of the tensors of an optimizer state dict that is loaded.

Each rank gets its parts and nothing else. Of whole tensors that each rank has it takes
its own; sharded ones, and those of the first rank, are exchanged.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_c._native import Placement
from fsdp_c._state.exchange import ExchangeItem, UnitItems, exchange
from fsdp_c._state.optim.header import Header, StateInfo, WantedState, read_header
from fsdp_c._state.parts import ParamPart
from fsdp_c._state.sharded_tensors import local_part
from fsdp_c._units.base import ShardedModule
from fsdp_c._units.failures import naming_ranks

# This rank's parts, by first name of the parameter and name of the state.
Values = dict[tuple[str, str], Tensor]
_Wanted = Mapping[str, WantedState]


def parts_of_own(
    modules: list[ShardedModule], wanted: _Wanted, state_dict: Mapping[str, Any]
) -> Values:
    """Return this rank's parts of tensors that each rank has, whole or sharded.

    Args:
        modules: The wrapped modules of the model.
        wanted: What each parameter is to have.
        state_dict: This rank's own, which fits.
    """
    values: Values = {}
    items: dict[ShardedModule, list[ExchangeItem]] = {}
    for each in wanted.values():
        part = each.part
        over = part.module or modules[0]
        for key, info in each.sharded.items():
            value = state_dict["state"][each.name][key]
            if not info.is_sharded:
                own = value.detach().reshape(-1)[part.begin : part.end]
                values[part.fqn, key] = own.to(part.param.device, copy=True)
                continue
            num_ranks = over.process_group.size()
            items.setdefault(over, []).append(
                ExchangeItem(
                    (part, key),
                    local_part(value),
                    info.dtype,
                    part.index,
                    part.spread.rows(part.index, num_ranks),
                    part.spread.parts(part.index, num_ranks),
                )
            )
    _receive(values, [(over, over.process_group, its) for over, its in items.items()])
    return values


def _receive(
    values: Values,
    items: list[tuple[ShardedModule, ProcessGroup, list[ExchangeItem]]],
) -> None:
    """Exchange the items of each unit; their keys are ``(part, key)``."""
    units = [
        UnitItems(module._sharded.name, group, module.compute_device, its)
        for module, group, its in items
    ]
    for (part, key), value in exchange(units, "optimizer states"):
        values[part.fqn, key] = value.to(part.param.device)


# From the first rank ---------------------------------------------------------


def _is_first(module: ShardedModule) -> bool:
    groups = module._sharded.config.groups
    return groups.process_group.rank() == 0 and (
        groups.inter_node_group is None or groups.inter_node_group.rank() == 0
    )


def header_from_first(
    modules: list[ShardedModule],
    state_dict: Mapping[str, Any] | None,
    parts: Mapping[str, ParamPart],
    group: ProcessGroup | None,
) -> Header:
    """Return the header of the first rank's state dict, on all ranks.

    Raises:
        Exception: What went wrong in reading it, on all ranks alike.
    """
    is_first = _is_first(modules[0]) if group is None else group.rank() == 0
    content: list[Any] = [None]
    if is_first:
        try:
            content = [_read_whole(modules, state_dict or {}, parts)]
        except Exception as error:  # the other ranks wait for it
            content = [error]
    for each in _object_groups(modules[0], group):
        if each.size() > 1:
            with naming_ranks(each, "broadcast of the optimizer state's header"):
                dist.broadcast_object_list(content, group=each, group_src=0)
    if isinstance(content[0], Exception):
        raise content[0]
    received: Header = content[0]
    return received


def _read_whole(
    modules: list[ShardedModule],
    state_dict: Mapping[str, Any],
    parts: Mapping[str, ParamPart],
) -> Header:
    if not all(_is_first(each) for each in modules):
        raise ValueError(
            "rank 0 of `group` must be rank 0 of the process groups of all units: "
            "leave `group` out"
        )
    names = [name for part in parts.values() for name in part.names]
    header = read_header(state_dict, names)
    for name, state in header.states.items():
        for key, value in state.items():
            if isinstance(value, StateInfo) and value.is_sharded:
                raise ValueError(
                    f"optimizer state {key!r} of parameter {name!r} is sharded: only "
                    "whole tensors can be loaded from rank 0"
                )
    return header


def _object_groups(
    module: ShardedModule, group: ProcessGroup | None
) -> list[ProcessGroup]:
    """Return the groups over which an object goes from rank 0 to all, in order."""
    if group is not None:
        return [group]
    groups = module._sharded.config.groups
    result = [groups.process_group]
    if groups.inter_node_group is not None and groups.process_group.rank() == 0:
        result.insert(0, groups.inter_node_group)  # to rank 0 of each replica
    return result


def parts_from_first(
    modules: list[ShardedModule],
    wanted: _Wanted,
    state_dict: Mapping[str, Any] | None,
) -> Values:
    """Return this rank's parts of whole tensors that the first rank has.

    All ranks of the model must call it. Replicas get theirs from the first replica.

    Args:
        modules: The wrapped modules of the model.
        wanted: What each parameter is to have.
        state_dict: The first rank's; ignored on the others.
    """
    values: Values = {}
    by_module: dict[ShardedModule, list[WantedState]] = {}
    for each in wanted.values():
        by_module.setdefault(each.part.module or modules[0], []).append(each)
    _receive(
        values,
        [
            (over, over.process_group, list(_whole_items(over, its, state_dict)))
            for over, its in by_module.items()
            if _is_in_first_replica(over)
        ],
    )
    _receive(
        values,
        [
            (over, replicas, list(_replica_items(replicas, its, values)))
            for over, its in by_module.items()
            if (replicas := over._sharded.config.groups.inter_node_group) is not None
            and replicas.size() > 1
        ],
    )
    return values


def _is_in_first_replica(module: ShardedModule) -> bool:
    replicas = module._sharded.config.groups.inter_node_group
    return replicas is None or replicas.rank() == 0


def _whole_items(
    over: ShardedModule,
    wanted: list[WantedState],
    state_dict: Mapping[str, Any] | None,
) -> Iterator[ExchangeItem]:
    """Yield the states that the first rank of a unit's group has whole."""
    assert state_dict is not None or not _is_first(over)  # it was checked
    states = state_dict["state"] if state_dict and _is_first(over) else None
    num_ranks = over.process_group.size()
    for each in wanted:
        part = each.part
        for key, info in each.sharded.items():
            yield ExchangeItem(
                (part, key),
                None if states is None else states[each.name][key],
                info.dtype,
                part.index,
                part.spread.whole(0, 1),
                part.spread.parts(part.index, num_ranks),
            )


def _replica_items(
    replicas: ProcessGroup, wanted: list[WantedState], values: Values
) -> Iterator[ExchangeItem]:
    """Yield the parts that the first replica has, for all replicas."""
    numels = [each.part.part_numel for each in wanted]
    held = Placement.on_ranks(numels, 0, 1)
    needed = Placement.on_ranks(numels, 0, replicas.size())
    for number, each in enumerate(wanted):
        for key, info in each.sharded.items():
            source = values.get((each.part.fqn, key))
            yield ExchangeItem(
                (each.part, key), source, info.dtype, number, held, needed
            )
