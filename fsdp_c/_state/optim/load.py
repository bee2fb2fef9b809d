"""Optimizer state dicts into the form that a sharded model's optimizer loads.

Checks come first, on what the dictionary holds and not on its elements; then the states
come, see Note [One exchange]. Each rank gets its parts and nothing else.
"""

import copy
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_c._native import Placement
from fsdp_c._state.exchange import ExchangeItem, Move, exchange
from fsdp_c._state.forms import load_item
from fsdp_c._state.optim.agreement import gather_reports
from fsdp_c._state.optim.classes import StateClasses, steps_wholes
from fsdp_c._state.optim.groups import groups_for_optimizer
from fsdp_c._state.optim.header import (
    Header,
    StateInfo,
    WantedState,
    check_header,
    read_header,
)
from fsdp_c._state.optim.keys import ParamKeys, keys_of_either
from fsdp_c._state.optim.save import WHOLE_STATES
from fsdp_c._state.optim.states import assemble
from fsdp_c._state.parts import ParamPart, find_parts
from fsdp_c._state.sharded_tensors import find_problem, is_sharded
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.collectives import object_of_first
from fsdp_c._units.parallel import from_state

_Wanted = Mapping[str, WantedState]
_Checked = tuple[ParamKeys, Header, _Wanted, list[dict[str, Any]] | None]


def load(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    state_dict: Mapping[str, Any] | None,
    *,
    is_sharded: bool = False,
    rank0_only: bool = False,
    is_named: bool = False,
    group: ProcessGroup | None = None,
    optim_input: Any = None,
) -> dict[str, Any]:
    """Return what ``optim.load_state_dict`` takes on this rank; nothing is changed.

    See ``FSDP.optim_state_dict_to_load``. Sharded tensors may come with any
    ``state_dict``; with ``is_sharded`` all ranks expect them. ``optim`` is None if
    ``optim_input`` says with what the optimizer was constructed; if that is None too,
    with ``model.parameters()``.
    """
    parts = find_parts(model)
    state_dict = _localized(state_dict, parts)
    if steps_wholes(optim):
        state_dict = _with_whole_states(state_dict, parts)
    optim_keys = keys_of_either(model, optim, optim_input, is_named=is_named)
    modules = list(sharded_modules(model))

    def check(header: Header) -> _Checked:
        keys = optim_keys.with_parts(parts)
        wanted = check_header(header, parts)
        groups = None
        if header.param_groups is not None:
            target = None if optim is None else optim.param_groups
            groups = groups_for_optimizer(header.param_groups, keys, target=target)
        for each in wanted.values():
            part = each.part
            if part.param not in keys.key_of_param:
                raise ValueError(
                    f"there is optimizer state for parameter {each.name!r}, which the "
                    "optimizer does not step: load it into an optimizer over the same "
                    "parameters"
                )
            # A rank that holds nothing of a parameter has a state if it had one before.
            each.has_state = part.is_stepped or (
                optim is not None and bool(optim.state.get(part.param))
            )
        assemble(keys, wanted)  # whether it can be; no elements are needed
        return keys, header, wanted, groups

    if rank0_only:
        keys, header, wanted, groups = check(
            _header_from_first(modules, state_dict, parts, group)
        )
        _take_from_first(wanted, state_dict)
    else:
        wanted, error = {}, None
        try:
            keys, header, wanted, groups = check(read_header(state_dict, parts))
            _check_sharded(wanted, state_dict)
        except Exception as caught:  # the other ranks wait for it
            error = caught
        _compare(modules, wanted, error, is_sharded)
        assert state_dict is not None  # or it was an error
        _take_own(wanted, state_dict)
    others = copy.deepcopy(header.others)
    states = assemble(keys, wanted)
    _restore_classes(optim, keys, states, header)
    result: dict[str, Any] = {"state": {**states, **others}}
    if groups is not None:
        result["param_groups"] = groups
    return result


def _with_whole_states(
    state_dict: Mapping[str, Any] | None, parts: Mapping[str, ParamPart]
) -> Mapping[str, Any] | None:
    """Say which states are whole, as :func:`fsdp_c._state.optim.save.save` does.

    torch.distributed.checkpoint.state_dict passes on states and groups alone. A name is
    whole for all parameters if it does not fit one of them.
    """
    if not isinstance(state_dict, Mapping) or WHOLE_STATES in state_dict:
        return state_dict
    given = state_dict.get("state")
    if not isinstance(given, Mapping):
        return state_dict
    states = [(p, given.get(name)) for p in parts.values() for name in p.names]
    whole = {
        key
        for part, state in states
        if isinstance(state, Mapping)
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0
        if not is_sharded(value) and value.shape != part.shape
    }
    return {**state_dict, WHOLE_STATES: dict.fromkeys(given, whole)}


def _restore_classes(
    optim: torch.optim.Optimizer | None,
    keys: ParamKeys,
    states: dict[Any, Any],
    header: Header,
) -> None:
    """Give states the classes that ``optim`` has; Note [States of other classes]."""
    if optim is None:
        if header.classes:
            name, classes = next(iter(header.classes.items()))
            raise ValueError(
                f"optimizer states of parameter {name!r} are of the classes {classes}: "
                "pass the optimizer as optim, which makes them"
            )
        return
    classes_of = StateClasses(optim)
    for key, state in states.items():
        special = {
            each
            for part in keys.parts[key]
            for name in part.names
            for each in header.classes.get(name, ())
        }
        classes_of.restore(keys.param_of_key[key], state, special)


def _localized(
    state_dict: Mapping[str, Any] | None, parts: Mapping[str, ParamPart]
) -> Mapping[str, Any] | None:
    """Replace states of tensor parallel parameters by what their unit has of them."""
    cuts = {
        name: (part.cut, part.over.dtensor_mesh)
        for part in parts.values()
        if part.cut is not None
        for name in part.names
    }
    if not cuts or state_dict is None or "state" not in state_dict:
        return state_dict
    states = dict(state_dict["state"])
    for name, state in states.items():
        if name in cuts:
            states[name] = {k: from_state(v, *cuts[name]) for k, v in state.items()}
    return {**state_dict, "state": states}


def _sharded_states(wanted: _Wanted) -> list[tuple[ParamPart, str, str, StateInfo]]:
    """Return the states that come as sharded tensors: parameter, names, info."""
    return [
        (each.part, each.name, key, info)
        for each in wanted.values()
        for key, info in each.infos.items()
        if info.is_sharded
    ]


def _check_sharded(wanted: _Wanted, state_dict: Any) -> None:
    for part, name, key, _ in _sharded_states(wanted):
        problem = find_problem(part.over, state_dict["state"][name][key])
        if problem is not None:
            raise ValueError(f"optimizer state {key!r} of parameter {name!r} {problem}")


def _compare(
    modules: list[ShardedModule],
    wanted: _Wanted,
    error: Exception | None,
    is_sharded: bool,
) -> None:
    """Raise if one of the ranks has an error, or not the same sharded tensors."""
    sharded = _sharded_states(wanted)
    names = [(part.fqn, key, info) for part, _, key, info in sharded]
    digest = hashlib.sha256(repr(names).encode()).hexdigest()
    groups = [each._sharded.groups.process_group for each in modules]
    groups = list(dict.fromkeys(groups)) if is_sharded or sharded else []
    what = "comparison of optimizer states to load"
    gathered = gather_reports(groups, lambda _: digest, error, what)
    for group, reports in zip(groups, gathered, strict=True):
        for rank, other in enumerate(reports):
            if other != digest:
                raise RuntimeError(
                    f"rank {rank} and rank {group.rank()} have sharded optimizer state "
                    "dicts of different parameters or states: pass what one call "
                    "returned on all ranks"
                )


# This rank's parts -----------------------------------------------------------


def _take_own(wanted: _Wanted, state_dict: Mapping[str, Any]) -> None:
    """Take this rank's parts of tensors that each rank has, whole or sharded."""
    items = []
    for each in wanted.values():
        part = each.part
        for key, info in each.infos.items():
            value = state_dict["state"][each.name][key]
            if info.is_sharded:
                items.append(load_item(part, key, value))
            else:
                own = value.detach().reshape(-1)[part.begin : part.end]
                each.sharded[key] = own.to(part.param.device, copy=True)
    _receive(wanted, items)


def _receive(
    wanted: _Wanted, items: Iterable[ExchangeItem], *, over_replicas: bool = False
) -> None:
    """Exchange the items, whose keys are names of states, into ``wanted``."""
    exchanged = exchange(items, "optimizer states", over_replicas=over_replicas)
    for item, value in exchanged:
        own = value.to(item.part.param.device)
        wanted[item.part.fqn].sharded[item.key] = own


def _header_from_first(
    modules: list[ShardedModule],
    state_dict: Any,
    parts: Mapping[str, ParamPart],
    group: ProcessGroup | None,
) -> Header:
    """Return the header of the first rank's state dict, on all ranks.

    What went wrong in reading it is raised on all ranks alike.
    """
    content: Any = None
    groups = modules[0]._sharded.groups
    if groups.is_first if group is None else group.rank() == 0:
        try:
            content = _read_whole(modules, state_dict or {}, parts)
        except Exception as error:  # the other ranks wait for it
            content = error
    path = [groups.process_group] if group is None else [group]
    if group is None and groups.inter_node_group and groups.process_group.rank() == 0:
        path.insert(0, groups.inter_node_group)  # to rank 0 of each replica
    for each in path:
        what = "broadcast of the optimizer state's header"
        content = object_of_first(content, each, what)
    if isinstance(content, Exception):
        raise content
    header: Header = content
    return header


def _read_whole(
    modules: list[ShardedModule], state_dict: Any, parts: Mapping[str, ParamPart]
) -> Header:
    if not all(each._sharded.groups.is_first for each in modules):
        raise ValueError(
            "rank 0 of `group` must be rank 0 of the process groups of all units: "
            "leave `group` out"
        )
    header = read_header(state_dict, parts)
    for name, state in header.states.items():
        for key, value in state.items():
            if isinstance(value, StateInfo) and value.is_sharded:
                raise ValueError(
                    f"optimizer state {key!r} of parameter {name!r} is sharded: only "
                    "whole tensors can be loaded from rank 0"
                )
    return header


def _take_from_first(wanted: _Wanted, state_dict: Any) -> None:
    """Take this rank's parts of whole tensors that the first rank has.

    Replicas get theirs from the first replica.
    """
    items, replicated = [], []
    for each in wanted.values():
        part, groups = each.part, each.part.over._sharded.groups
        held, needed = part.spread.whole(0, 1), part.spread.sharded(part.index)
        for key, info in each.infos.items() if groups.is_in_first_replica else ():
            whole = state_dict["state"][each.name][key] if groups.is_first else None
            move = Move(whole, info.dtype, part.index, held, needed)
            items.append(ExchangeItem(key, part, move))
    _receive(wanted, items)
    for each in wanted.values():
        part, groups = each.part, each.part.over._sharded.groups
        replicas = groups.inter_node_group
        if replicas is not None and replicas.size() > 1:
            numels = [*[0] * part.index, part.part_numel]
            held = Placement.on_ranks(numels, 0, 1)
            needed = Placement.on_ranks(numels, 0, replicas.size())
            for key, own in each.sharded.items():
                source = own if groups.is_in_first_replica else None
                move = Move(source, own.dtype, part.index, held, needed)
                replicated.append(ExchangeItem(key, part, move))
    _receive(wanted, replicated, over_replicas=True)
