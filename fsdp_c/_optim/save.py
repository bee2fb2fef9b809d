"""Optimizer state dicts of a sharded model: full, sharded, local.

The ranks agree on what there is with one small collective a call, then pass each
other elements.

Note [Batches of units]
An exchange takes what it packs as extra memory, and so does a result that is made on
another device than it ends on. So units are exchanged one after the other. Where
results come into place and most pieces go straight (see transfer.py), several units
go in one exchange, as long as what it packs is no more than the largest unit: ranks
that do not wait for each other after each unit are faster. All ranks batch alike.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_c._optim.agreement import AgreedState, agree, unpacked_value
from fsdp_c._optim.keys import ParamKeys
from fsdp_c._optim.places import Place
from fsdp_c._optim.states import OptimStates, ParamState, collect
from fsdp_c._optim.transfer import (
    DIRECT_NBYTES,
    Item,
    Range,
    transfer,
    transfer_device,
)
from fsdp_c._state.sharded_tensors import (
    has_rows,
    row_elements,
    rows_of,
    wrap_chunk,
)
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
        model: As for :func:`fsdp_c._optim.states.collect`.
        optim: Steps its parameters.
        options: What to return.
        state_dict: Of ``optim``; ``optim.state_dict()`` if None.
        keys: The keys in it; those of ``optim`` if None.

    Returns:
        The state dict; empty where ``rank0_only`` leaves this rank out.

    Raises:
        RuntimeError: The ranks' optimizers do not fit together, or it failed on
            another rank.
        ValueError: See :func:`~fsdp_c._optim.states.collect`; or state is sharded on
            some ranks only.
    """
    modules = list(sharded_modules(model))
    destination = _first_rank(modules, options.group) if options.rank0_only else None
    groups = [
        group
        for group in dict.fromkeys(each._config.groups.shard_group for each in modules)
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
        for batch in _batches(agreed.values(), options):
            for (name, key), value in _batch_tensors(
                batch, local.states, options, destination
            ).items():
                states[name][key] = value
    if not is_wanted:
        return {}
    return _result(local, agreed, states)


def _first_rank(modules: list[ShardedModule], group: ProcessGroup | None) -> int | None:
    """Return the global rank that a rank0_only state dict is for, if known here."""
    if group is not None:
        return dist.get_global_rank(group, 0)
    if not modules:
        return None
    groups = modules[0]._config.groups
    if groups.inter_node_group is not None and groups.inter_node_group.rank() != 0:
        return -1  # another replica has it
    return dist.get_global_rank(groups.process_group, 0)


def _batches(
    agreed: Iterable[AgreedState], options: SaveOptions
) -> Iterator[list[AgreedState]]:
    """Yield the states in lists of which each is for one exchange.

    See Note [Batches of units]. Those of a list have the same device and group.
    """
    by_module: dict[ShardedModule | None, list[AgreedState]] = {}
    for state in agreed:
        by_module.setdefault(state.place.module, []).append(state)
    most = max((_nbytes(states) for states in by_module.values()), default=0)
    batch: list[AgreedState] = []
    packed = 0
    last: Any = None
    for module, states in by_module.items():
        kind = None if module is None else (module.compute_device, _group_of(states))
        more = _packed_nbytes(states)
        is_alone = module is None or options.shards or module.compute_device != _CPU
        if batch and (is_alone or kind != last or packed + more > most):
            yield batch
            batch, packed = [], 0
        batch += states
        packed += more
        last = kind
    if batch:
        yield batch


def _group_of(states: Sequence[AgreedState]) -> ProcessGroup | None:
    return states[0].place.shard_group


def _nbytes(states: Sequence[AgreedState]) -> int:
    """Return the bytes of whole parameters' states."""
    return sum(
        state.place.numel * dtype.itemsize
        for state in states
        for dtype in state.sharded.values()
    )


def _packed_nbytes(states: Sequence[AgreedState]) -> int:
    """Return how many of the bytes go packed, at most, if whole ones are needed."""
    if _group_of(states) is None:
        return 0
    return sum(
        nbytes
        for state in states
        for dtype in state.sharded.values()
        for begin, end in state.place.parts
        if (nbytes := (end - begin) * dtype.itemsize) < DIRECT_NBYTES
    )


def _batch_tensors(
    agreed: list[AgreedState],
    local: Mapping[str, ParamState],
    options: SaveOptions,
    destination: int | None,
) -> dict[tuple[str, str], Any]:
    """Return the sharded states of a batch, in the form that is asked for."""
    entries = [
        (state.place, key, dtype)
        for state in agreed
        for key, dtype in state.sharded.items()
    ]
    module, group = agreed[0].place.module, _group_of(agreed)
    is_wanted = destination in (None, dist.get_rank())
    if module is None or group is None:
        if not is_wanted:
            return {}
        return {
            (place.fqn, key): _of_whole(place, local[place.fqn].sharded[key], options)
            for place, key, _ in entries
        }
    target = None if destination is None else dist.get_group_rank(group, destination)
    needed = {
        state.place: _needed(state.place, group.size(), target, options.shards)
        for state in agreed
    }
    items = [Item(dtype, place.parts, needed[place]) for place, _, dtype in entries]
    parts = [local[place.fqn].sharded.get(key) for place, key, _ in entries]
    device = transfer_device(module.compute_device, group)
    values = transfer(items, parts, group=group, device=device)
    if not is_wanted:
        return {}
    end = _CPU if options.offload_to_cpu else module.compute_device
    return {
        (place.fqn, key): _in_form(
            place, value if device == end else value.to(end), options
        )
        for (place, key, _), value in zip(entries, values, strict=True)
    }


def _needed(
    place: Place, world_size: int, target: int | None, shards: bool
) -> list[Range]:
    """Return which elements of a parameter's state each rank needs."""
    whole = (0, place.numel)
    if target is not None:
        return [whole if rank == target else (0, 0) for rank in range(world_size)]
    if not shards or not has_rows(place.shape):
        return [whole] * world_size
    return row_elements(place.shape, world_size)


def _in_form(place: Place, value: Tensor, options: SaveOptions) -> Any:
    """Return a state of which this rank has what it needs, 1-D."""
    if not options.shards or not has_rows(place.shape):
        return value.view(place.shape)
    assert place.module is not None  # it was passed between ranks
    chunk = value.view(-1, *place.shape[1:])
    return wrap_chunk(place.module, chunk, place.shape, use_dtensor=options.use_dtensor)


def _of_whole(place: Place, value: Tensor, options: SaveOptions) -> Any:
    """Return a state that each rank has in whole."""
    module = place.module
    device = _CPU if options.offload_to_cpu else value.device
    if module is None or not options.shards or not has_rows(place.shape):
        return value.detach().reshape(place.shape).to(device, copy=True)
    row_numel = place.shape[1:].numel()
    begin, end = rows_of(place.shape[0], module.world_size, module.rank)
    part = value.detach()[begin * row_numel : end * row_numel].to(device, copy=True)
    return wrap_chunk(
        module,
        part.reshape(-1, *place.shape[1:]),
        place.shape,
        use_dtensor=options.use_dtensor,
    )


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
