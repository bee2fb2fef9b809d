"""Optimizer states from the first rank, the only one that has the dictionary.

Each rank gets its parts and nothing else; replicas get them from the first replica.
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_c._optim.entries import Values, all_entries, by_module, take
from fsdp_c._optim.header import Header, TensorInfo, Wanted, read_header
from fsdp_c._optim.places import Place
from fsdp_c._optim.transfer import Item, Range
from fsdp_c._units.base import ShardedModule
from fsdp_c._units.failures import naming_ranks


def _is_first(module: ShardedModule) -> bool:
    groups = module._config.groups
    return groups.process_group.rank() == 0 and (
        groups.inter_node_group is None or groups.inter_node_group.rank() == 0
    )


def header_from_first(
    modules: list[ShardedModule],
    state_dict: Mapping[str, Any] | None,
    places: Mapping[str, Place],
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
            if not all(_is_first(each) for each in modules):
                raise ValueError(
                    "rank 0 of `group` must be rank 0 of the process groups of all "
                    "units: leave `group` out"
                )
            names = [name for place in places.values() for name in place.names]
            header = read_header(state_dict or {}, names)
            for name, state in header.states.items():
                for key, value in state.items():
                    if isinstance(value, TensorInfo) and value.is_sharded:
                        raise ValueError(
                            f"optimizer state {key!r} of parameter {name!r} is "
                            "sharded: only whole tensors can be loaded from rank 0"
                        )
            content = [header]
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


def _object_groups(
    module: ShardedModule, group: ProcessGroup | None
) -> list[ProcessGroup]:
    """Return the groups over which an object goes from rank 0 to all, in order."""
    if group is not None:
        return [group]
    groups = module._config.groups
    result = [groups.process_group]
    if groups.inter_node_group is not None and groups.process_group.rank() == 0:
        result.insert(0, groups.inter_node_group)  # to rank 0 of each replica
    return result


def scatter(
    modules: list[ShardedModule],
    wanted: Mapping[str, Wanted],
    state_dict: Mapping[str, Any] | None,
) -> Values:
    """Return this rank's parts of whole tensors that the first rank has.

    All ranks of the model must call it.

    Args:
        modules: The wrapped modules of the model.
        wanted: What each parameter is to have.
        state_dict: The first rank's; ignored on the others.
    """
    values: Values = {}
    for module, entries in by_module(all_entries(wanted)).items():
        over = modules[0] if module is None else module
        groups = over._config.groups
        replicas = groups.inter_node_group
        parts: list[Tensor | None] = [None] * len(entries)
        if replicas is None or replicas.rank() == 0:
            if _is_first(over):
                assert state_dict is not None  # it was checked
                states = state_dict["state"]
                parts = [states[entry.name][entry.key] for entry in entries]
            items = [
                Item(
                    e.info.dtype,
                    _of_first(e.place.numel, groups.process_group),
                    e.place.parts_over(groups.process_group),
                )
                for e in entries
            ]
            take(
                values,
                entries,
                items,
                parts,
                group=groups.process_group,
                device=over.compute_device,
            )
        if replicas is not None and replicas.size() > 1:
            items = [
                Item(
                    e.info.dtype,
                    _of_first(e.place.part_numel, replicas),
                    [(0, e.place.part_numel)] * replicas.size(),
                )
                for e in entries
            ]
            parts = [values.get((e.place.fqn, e.key)) for e in entries]
            take(
                values,
                entries,
                items,
                parts,
                group=replicas,
                device=over.compute_device,
            )
    return values


def _of_first(numel: int, group: ProcessGroup) -> list[Range]:
    """Return the ranges of elements that only rank 0 has."""
    return [(0, numel), *[(0, 0)] * (group.size() - 1)]
