"""Optimizer state dicts of a sharded model: full and sharded.

The ranks agree on what there is with one small collective a call, then exchange it.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp.api import OptimStateDictConfig, ShardedOptimStateDictConfig

from fsdp_c._state.forms import Form, save_tensors
from fsdp_c._state.optim.agreement import AgreedState, Scalar, agree, unpacked_value
from fsdp_c._state.optim.keys import ParamKeys
from fsdp_c._state.optim.states import OptimStates, collect, give_values
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.collectives import object_of_first

# A top-level entry of a full or sharded optimizer state dict: names of states that
# are tensors without one value per element, by parameter. There only if there are any.
WHOLE_STATES = "whole_states"

# Likewise, for states that differ between ranks: the values of all ranks, in order.
RANK_STATES = "rank_states"

# Likewise, for states of classes of their own: the names of these, by parameter.
STATE_CLASSES = "state_classes"


def save(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    config: OptimStateDictConfig,
    *,
    group: ProcessGroup | None = None,
    state_dict: Mapping[str, Any] | None = None,
    keys: ParamKeys | None = None,
) -> dict[str, Any]:
    """Return the full or sharded state dict of ``optim``, by parameter names.

    See ``FSDP.optim_state_dict`` for ``group``. ``state_dict`` is
    ``optim.state_dict()`` if None, ``keys`` are those in it.
    """
    modules = list(sharded_modules(model))
    rank0_only = getattr(config, "rank0_only", False)
    first = _first_rank(modules, group) if rank0_only else None
    shards = isinstance(config, ShardedOptimStateDictConfig)
    form = Form.of_config(config, shards=shards, first=first)
    groups = [
        each
        for each in dict.fromkeys(m._sharded.groups.shard_group for m in modules)
        if each is not None
        and (first is None or first in dist.get_process_group_ranks(each))
    ]
    local = OptimStates({}, None, {})
    error: Exception | None = None
    try:
        local = collect(model, optim, state_dict=state_dict, keys=keys)
        give_values(optim, local.states)
    except Exception as caught:  # the other ranks wait for it
        error = caught
    agreed = agree(local.states, groups, error)
    tensors = [
        (form, (state.part, key, local.states[name].sharded.get(key), dtype))
        for name, state in agreed.items()
        for key, dtype in state.sharded.items()
    ]
    states: dict[str, dict[str, Any]] = {
        name: {key: unpacked_value(value) for key, value in state.plain.items()}
        for name, state in agreed.items()
    }
    with torch.no_grad():
        for part, key, value in save_tensors(tensors, "optimizer states"):
            states[part.fqn][key] = value
    return _result(local, agreed, states) if form.is_wanted else {}


def _first_rank(modules: list[ShardedModule], group: ProcessGroup | None) -> int | None:
    """Return the global rank that a rank0_only state dict is for.

    Collective with HYBRID_SHARD. Other replicas must know it too: a unit inside may be
    sharded over all ranks.
    """
    if group is not None:
        return dist.get_global_rank(group, 0)
    if not modules:
        return None
    groups = modules[0]._sharded.groups
    replicas = groups.inter_node_group
    if replicas is None:
        return dist.get_global_rank(groups.process_group, 0)
    first = dist.get_global_rank(replicas, 0)
    if groups.shard_group is not None:
        what = "search for the first rank"
        first = object_of_first(first, groups.shard_group, what)
    return first


def _result(
    local: OptimStates,
    agreed: Mapping[str, AgreedState],
    states: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    result: dict[str, Any] = {"state": states}
    whole: dict[str, list[str]] = {}
    per_rank: dict[str, dict[str, list[Any]]] = {}
    for name, state in agreed.items():
        for key, value in state.plain.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                whole.setdefault(name, []).append(key)
        for key, each in state.per_rank.items():
            # Numbers, not 0-dim tensors: torch.distributed.checkpoint has an entry for
            # each tensor of a list, and would miss those of more ranks.
            per_rank.setdefault(name, {})[key] = [
                value.value if isinstance(value, Scalar) else unpacked_value(value)
                for value in each.values
            ]
    classes = {name: state.classes for name, state in agreed.items() if state.classes}
    entries = {STATE_CLASSES: classes, WHOLE_STATES: whole, RANK_STATES: per_rank}
    result.update((name, entry) for name, entry in entries.items() if entry)
    for key, other in local.others.items():
        warnings.warn(
            f"Found a optim state, {key}, that FSDP cannot process. FSDP will directly "
            "copy everything to the returned state_dict: it belongs to no parameter "
            "of the optimizer",
            stacklevel=4,
        )
        states[key] = other
    if local.param_groups is not None:
        result["param_groups"] = local.param_groups
    return result
