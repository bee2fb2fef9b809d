"""Optimizer state dicts of a sharded model: full and sharded.

The ranks agree on what there is with one small collective a call, then exchange it.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_c._state.exchange import ExchangeItem, UnitItems, exchange
from fsdp_c._state.optim.agreement import AgreedState, agree, unpacked_value
from fsdp_c._state.optim.keys import ParamKeys
from fsdp_c._state.optim.states import OptimStates, ParamState, collect
from fsdp_c._state.parts import ParamPart
from fsdp_c._state.sharded_tensors import has_rows, in_form, rows_of, wrap_chunk
from fsdp_c._units.base import ShardedModule, sharded_modules

# A top-level entry of a full or sharded optimizer state dict: names of states that
# are tensors without one value per element, by parameter. There only if there are any.
WHOLE_STATES = "whole_states"

# Likewise: for states that are another on each rank, all ranks' values in order.
RANK_STATES = "rank_states"

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class SaveOptions:
    """How to save.

    Attributes:
        shards: Return sharded tensors, on all ranks.
        rank0_only: Return whole tensors on rank 0 only.
        offload_to_cpu: Return tensors in host memory.
        use_dtensor: Return DTensors; None: if the unit has a device mesh.
        group: Whose rank 0 is meant; None: the first of the model's ranks.
    """

    shards: bool = False
    rank0_only: bool = False
    offload_to_cpu: bool = True
    use_dtensor: bool | None = None
    group: ProcessGroup | None = None


def save(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    options: SaveOptions,
    *,
    state_dict: Mapping[str, Any] | None = None,
    keys: ParamKeys | None = None,
) -> dict[str, Any]:
    """Return the full or sharded state dict of ``optim``, by parameter names.

    All ranks of ``model`` must call it. The tensors own their memory.

    Args:
        model: As for :func:`fsdp_c._state.optim.states.collect`.
        optim: Steps its parameters.
        options: What to return.
        state_dict: Of ``optim``; ``optim.state_dict()`` if None.
        keys: The keys in it; those of ``optim`` if None.

    Returns:
        The state dict; empty where ``rank0_only`` leaves this rank out.

    Raises:
        RuntimeError: The ranks' optimizers do not fit together, or it failed on
            another rank.
        ValueError: See :func:`~fsdp_c._state.optim.states.collect`; or state is
            sharded on some ranks only.
    """
    modules = list(sharded_modules(model))
    destination = _first_rank(modules, options.group) if options.rank0_only else None
    groups = [
        group
        for group in dict.fromkeys(
            each._sharded.config.groups.shard_group for each in modules
        )
        if group is not None
        and (destination is None or destination in dist.get_process_group_ranks(group))
    ]
    local = OptimStates({}, None, {})
    error: Exception | None = None
    try:
        local = collect(model, optim, state_dict=state_dict, keys=keys)
    except Exception as caught:  # the other ranks wait for it
        error = caught
    agreed = agree(local.states, groups, error)
    is_wanted = destination in (None, dist.get_rank())
    states: dict[str, dict[str, Any]] = {
        name: {key: unpacked_value(value) for key, value in state.plain.items()}
        for name, state in agreed.items()
    }
    with torch.no_grad():
        for state in agreed.values():
            if state.part.shard_group is None and is_wanted:
                for key in state.sharded:
                    value = local.states[state.part.fqn].sharded[key]
                    states[state.part.fqn][key] = _of_whole(state.part, value, options)
        units = _units(agreed.values(), local.states, options, destination)
        for (part, key), value in exchange(units, "optimizer states"):
            if is_wanted:
                states[part.fqn][key] = in_form(
                    part.module,
                    value,
                    part.shape,
                    device=_CPU
                    if options.offload_to_cpu
                    else part.module.compute_device,
                    shards=options.shards,
                    use_dtensor=options.use_dtensor,
                )
    if not is_wanted:
        return {}
    return _result(local, agreed, states)


def _first_rank(modules: list[ShardedModule], group: ProcessGroup | None) -> int | None:
    """Return the global rank that a rank0_only state dict is for, if known here."""
    if group is not None:
        return dist.get_global_rank(group, 0)
    if not modules:
        return None
    groups = modules[0]._sharded.config.groups
    if groups.inter_node_group is not None and groups.inter_node_group.rank() != 0:
        return -1  # another replica has it
    return dist.get_global_rank(groups.process_group, 0)


def _units(
    agreed: Iterable[AgreedState],
    local: Mapping[str, ParamState],
    options: SaveOptions,
    destination: int | None,
) -> Iterator[UnitItems]:
    """Yield what is exchanged of each unit that is sharded."""
    by_module: dict[ShardedModule, list[AgreedState]] = {}
    for state in agreed:
        if state.part.module is not None and state.part.shard_group is not None:
            by_module.setdefault(state.part.module, []).append(state)
    for module, its_states in by_module.items():
        group = module.process_group
        target = range(group.size())
        if destination is not None:
            first = dist.get_group_rank(group, destination)
            target = range(first, first + 1)
        items = []
        for state in its_states:
            part = state.part
            held = part.spread.parts(part.index, group.size())
            if options.shards:
                needed = part.spread.rows(part.index, group.size())
            else:
                needed = part.spread.whole(target.start, target.stop)
            items += [
                ExchangeItem(
                    (part, key),
                    local[part.fqn].sharded.get(key),
                    dtype,
                    part.index,
                    held,
                    needed,
                )
                for key, dtype in state.sharded.items()
            ]
        yield UnitItems(module._sharded.name, group, module.compute_device, items)


def _of_whole(part: ParamPart, value: Tensor, options: SaveOptions) -> Any:
    """Return a state that each rank has in whole."""
    module = part.module
    device = _CPU if options.offload_to_cpu else value.device
    whole = value.detach().reshape(part.shape)
    if module is None or not options.shards or not has_rows(part.shape):
        return whole.to(device, copy=True)
    begin, end = rows_of(part.shape[0], module.world_size, module.rank)
    chunk = whole[begin:end].to(device, copy=True)
    return wrap_chunk(module, chunk, part.shape, use_dtensor=options.use_dtensor)


def _result(
    local: OptimStates,
    agreed: Mapping[str, AgreedState],
    states: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    result: dict[str, Any] = {"state": states}
    whole = {
        name: names
        for name, state in agreed.items()
        if (
            names := [
                key
                for key, value in state.plain.items()
                if isinstance(value, Tensor) and value.dim() > 0
            ]
        )
    }
    if whole:
        result[WHOLE_STATES] = whole
    per_rank = {
        name: {
            key: [unpacked_value(each) for each in value.values]
            for key, value in state.per_rank.items()
        }
        for name, state in agreed.items()
        if state.per_rank
    }
    if per_rank:
        result[RANK_STATES] = per_rank
    for key, value in local.others.items():
        warnings.warn(
            f"Found a optim state, {key}, that FSDP cannot process. FSDP will directly "
            "copy everything to the returned state_dict: it belongs to no parameter "
            "of the optimizer",
            stacklevel=4,
        )
        states[key] = value
    if local.param_groups is not None:
        result["param_groups"] = local.param_groups
    return result
