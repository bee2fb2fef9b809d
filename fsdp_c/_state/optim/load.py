"""Optimizer state dicts into the form that a sharded model's optimizer loads.

Checks come first, on what the dictionary holds and not on its elements; then the states
come, see Note [One exchange].
"""

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from fsdp_c._state.optim.agreement import PerRank, unpacked_value
from fsdp_c._state.optim.groups import groups_for_optimizer
from fsdp_c._state.optim.header import (
    Header,
    StateInfo,
    WantedState,
    check_header,
    read_header,
)
from fsdp_c._state.optim.keys import (
    ParamKeys,
    check_params,
    keys_of_input,
    keys_of_optimizer,
)
from fsdp_c._state.optim.receive import (
    Values,
    header_from_first,
    parts_from_first,
    parts_of_own,
)
from fsdp_c._state.optim.states import ParamState, assemble
from fsdp_c._state.parts import ParamPart, find_parts, parts_of_params
from fsdp_c._state.sharded_tensors import find_problem
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.failures import naming_ranks


@dataclass(frozen=True)
class LoadOptions:
    """How to load.

    Attributes:
        is_sharded: The tensors are sharded ones, each rank has its own dictionary.
        rank0_only: Only rank 0 has the dictionary.
        is_named: The optimizer's own state dict has names for keys.
        group: Whose rank 0 is meant; None: the first of the model's ranks.
    """

    is_sharded: bool = False
    rank0_only: bool = False
    is_named: bool = False
    group: ProcessGroup | None = None


def load(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    state_dict: Mapping[str, Any] | None,
    options: LoadOptions,
    *,
    optim_input: Any = None,
) -> dict[str, Any]:
    """Return what ``optim.load_state_dict`` takes on this rank.

    Whole tensors that every rank has need no communication. Otherwise all ranks of
    ``model`` must call it. The result owns its memory; nothing is changed.

    Args:
        model: As for :func:`fsdp_c._state.optim.states.collect`.
        optim: The optimizer that will load it; None if ``optim_input`` says.
        state_dict: Full or sharded; ignored where ``rank0_only`` leaves this rank
            out.
        options: How to load.
        optim_input: What the optimizer was constructed with, instead of ``optim``;
            ``model.parameters()`` if both are None.

    Raises:
        RuntimeError: It failed on another rank.
        TypeError: ``state_dict`` is no dictionary.
        ValueError: Names, shapes or groups do not fit the model or the optimizer.
    """
    parts = find_parts(model)
    of_param = parts_of_params(parts)
    if optim is None or optim_input is not None:
        keys = keys_of_input(model, optim_input)
    else:
        keys = keys_of_optimizer(model, optim, is_named=options.is_named)
    modules = list(sharded_modules(model))
    loader = _Loader(optim, modules, keys, of_param)
    if options.rank0_only:
        header = header_from_first(modules, state_dict, parts, options.group)
        wanted, groups = loader.check(header, parts)
        values = parts_from_first(modules, wanted, state_dict)
    else:
        header, wanted, groups = _checked_alike(
            modules,
            options,
            lambda: _read_and_check(loader, state_dict, parts),
        )
        assert state_dict is not None  # it was checked
        values = parts_of_own(modules, wanted, state_dict)
    result: dict[str, Any] = {"state": loader.assemble(wanted, values)}
    for key, value in header.others.items():
        result["state"][key] = copy.deepcopy(value)
    if groups is not None:
        result["param_groups"] = groups
    return result


class _Loader:
    """The optimizer to load into."""

    def __init__(
        self,
        optim: torch.optim.Optimizer | None,
        modules: list[ShardedModule],
        keys: ParamKeys,
        of_param: Mapping[nn.Parameter, list[ParamPart]],
    ) -> None:
        self.optim = optim
        self.modules = modules
        self.keys = keys
        self.of_param = of_param

    def check(
        self, header: Header, parts: Mapping[str, ParamPart]
    ) -> tuple[dict[str, WantedState], list[dict[str, Any]] | None]:
        """Return what each parameter is to have, and the groups."""
        check_params(self.keys, self.of_param)
        wanted = check_header(header, parts)
        groups = None
        if header.param_groups is not None:
            groups = groups_for_optimizer(
                header.param_groups,
                self.keys,
                self.of_param,
                target=None if self.optim is None else self.optim.param_groups,
            )
        for each in wanted.values():
            if each.part.param not in self.keys.key_of_param:
                raise ValueError(
                    f"there is optimizer state for parameter {each.name!r}, which the "
                    "optimizer does not step: load it into an optimizer over the same "
                    "parameters"
                )
        # The flat parameters' plain states must agree; no elements are needed.
        self.assemble(wanted, None)
        return wanted, groups

    def assemble(
        self,
        wanted: Mapping[str, WantedState],
        values: Values | None,
    ) -> dict[Any, Any]:
        """Return the "state" of this rank; a rehearsal if ``values`` is None."""
        states: dict[str, ParamState] = {}
        for fqn, each in wanted.items():
            part = each.part
            state = ParamState(part, has_state=self._is_stepped_here(part))
            for key, info in each.sharded.items():
                if values is not None:
                    state.sharded[key] = values[fqn, key]
                elif part.is_flat:
                    state.sharded[key] = torch.empty(
                        part.part_numel, dtype=info.dtype, device="meta"
                    )
            state.plain = {
                key: unpacked_value(
                    value.of(part, key) if isinstance(value, PerRank) else value
                )
                for key, value in each.plain.items()
            }
            states[fqn] = state
        return assemble(self.keys, self.of_param, states)

    def _is_stepped_here(self, part: ParamPart) -> bool:
        """Whether this rank's optimizer has state for a parameter that has some."""
        if part.is_flat or part.part_numel > 0 or part.shard_group is None:
            return True
        return self.optim is not None and bool(self.optim.state.get(part.param))


def _read_and_check(
    loader: _Loader, state_dict: Any, parts: Mapping[str, ParamPart]
) -> tuple[Header, dict[str, WantedState], list[dict[str, Any]] | None]:
    header = read_header(state_dict, [n for p in parts.values() for n in p.names])
    wanted, groups = loader.check(header, parts)
    for part, name, key, _ in _sharded_states(wanted):
        value = state_dict["state"][name][key]
        problem = find_problem(part.module or loader.modules[0], value)
        if problem is not None:
            raise ValueError(f"optimizer state {key!r} of parameter {name!r} {problem}")
    return header, wanted, groups


def _sharded_states(
    wanted: Mapping[str, WantedState],
) -> list[tuple[ParamPart, str, str, StateInfo]]:
    """Return the states that come as sharded tensors: parameter, names, info."""
    return [
        (each.part, each.name, key, info)
        for each in wanted.values()
        for key, info in each.sharded.items()
        if info.is_sharded
    ]


def _process_groups(modules: list[ShardedModule]) -> list[ProcessGroup]:
    return list(
        dict.fromkeys(each._sharded.config.groups.process_group for each in modules)
    )


def _checked_alike(
    modules: list[ShardedModule],
    options: LoadOptions,
    check: Callable[[], tuple[Header, dict[str, WantedState], Any]],
) -> tuple[Header, dict[str, WantedState], Any]:
    """Return what ``check`` does; with sharded tensors, if it does on all ranks."""
    error: Exception | None = None
    result: Any = None
    try:
        result = check()
    except Exception as caught:  # the other ranks wait for it
        error = caught
    sharded = [] if result is None else _sharded_states(result[1])
    if options.is_sharded or sharded:
        names = [(part.fqn, key, info) for part, _, key, info in sharded]
        digest = hashlib.sha256(repr(names).encode()).hexdigest()
        mine = (None if error is None else str(error), digest)
        gathered = []
        for group in _process_groups(modules):
            reports: list[Any] = [mine] * group.size()
            if group.size() > 1:
                with naming_ranks(group, "comparison of optimizer states to load"):
                    dist.all_gather_object(reports, mine, group=group)
            gathered.append((group, reports))
        if error is None:
            for group, reports in gathered:
                _check_reports(group, reports)
    if error is not None:
        raise error
    checked: tuple[Header, dict[str, WantedState], Any] = result
    return checked


def _check_reports(group: ProcessGroup, reports: list[tuple[str | None, str]]) -> None:
    _, mine = reports[group.rank()]
    for rank, (message, digest) in enumerate(reports):
        if message is not None:
            raise RuntimeError(f"rank {rank} of the group: {message}")
        if digest != mine:
            raise RuntimeError(
                f"rank {rank} and rank {group.rank()} have sharded optimizer state "
                "dicts of different parameters or states: pass what one call returned "
                "on all ranks"
            )
