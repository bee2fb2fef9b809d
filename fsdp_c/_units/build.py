"""Builds the unit of a module: its parameters on their device, then sharded."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fsdp_c import _native
from fsdp_c._units.base import Ignored, ShardedUnit
from fsdp_c._units.buffers import UnitBuffers
from fsdp_c._units.collectives import broadcast_from_first
from fsdp_c._units.config import Config
from fsdp_c._units.cuts import Cut, local_of
from fsdp_c._units.fused_layers import ask_to_be_called
from fsdp_c._units.keep_whole import block_numels, check_padding, kept_of
from fsdp_c._units.materialize import materialize
from fsdp_c._units.originals import Originals
from fsdp_c._units.parallel import ParallelParams, localize
from fsdp_c._units.params import collect_uses, move_to_device, own_modules
from fsdp_c._units.uses import ParamUse, mark_sharded
from fsdp_c._units.whole_only import refuse_running_with_shards


def build_unit(
    module: nn.Module,
    config: Config,
    ignored: Ignored,
    device: torch.device,
    *,
    name: str,
    left_out: frozenset[nn.Parameter],
) -> ShardedUnit:
    """Shard the parameters of ``module`` that no unit in it has, on ``device``.

    ``left_out`` are parameters that belong to a unit outside.
    """
    own = list(own_modules(module, ignored.modules))
    if materialize(own, config.param_init_fn, device, left_out):
        own = list(own_modules(module, ignored.modules))  # it may have changed
    uses = collect_uses(module, ignored_params=ignored.params, left_out=left_out)
    uses, cuts = localize(uses, config.device_mesh)
    if cuts and config.full_precision_in_eval:
        raise ValueError(
            f"unit {name!r} has parameters that are DTensors, which forward shows in "
            "param_dtype only: unset FSDP_USE_FULL_PREC_IN_EVAL"
        )
    parallel = ParallelParams(cuts, config.mixed_precision.param_dtype)
    move_to_device(own, uses, device)
    params = [use.param for use in uses]
    if config.sync_module_states:
        tensors: list[Tensor] = list(dict.fromkeys(params))
        for _, current in own:
            tensors += (local_of(buffer) for buffer in current.buffers(recurse=False))
        broadcast_from_first(tensors, config.groups.process_group)
        if config.groups.inter_node_group is not None:
            broadcast_from_first(tensors, config.groups.inter_node_group)
    ask_to_be_called(module)
    unit = config.make_unit(
        name,
        params,
        device,
        is_parallel=bool(cuts),
        block_numels=_blocks(name, uses, config, device, cuts),
    )
    return take_unit(module, unit, config, ignored, uses, parallel)


def _blocks(
    name: str,
    uses: Sequence[ParamUse],
    config: Config,
    device: torch.device,
    cuts: Mapping[nn.Parameter, Cut],
) -> list[int] | None:
    """Return the blocks that the unit is to keep whole; see keep_whole()."""
    firsts = {use.slot: use for use in reversed(uses)}
    kept = {slot: kept_of(use.module, use.name) for slot, use in firsts.items()}
    num_shards = config.groups.num_shards
    blocks = block_numels([kept[use.slot] for use in uses], num_shards)
    if blocks is None:
        return None
    for slot, use in firsts.items():
        if kept[slot] is not None and use.param in cuts:
            raise ValueError(
                f"unit {name!r}: parameter {use.fqn!r} is a tensor parallel DTensor, "
                "of which no rank has the whole: leave it out of keep_whole()"
            )
    in_order = [firsts[slot] for slot in sorted(firsts)]
    layout = config.make_layout(
        [(u.param.numel(), u.param.dtype, u.param.requires_grad) for u in in_order],
        num_shards,
        is_cpu=device.type == "cpu",
        block_numels=block_numels([kept[use.slot] for use in in_order], num_shards),
    )
    try:
        check_padding(
            [(u.fqn, u.param.numel(), kept[u.slot]) for u in in_order], layout
        )
    except ValueError as error:
        raise ValueError(f"unit {name!r}: {error}") from error
    return blocks


def take_unit(
    module: nn.Module,
    unit: _native.Unit,
    config: Config,
    ignored: Ignored,
    uses: Sequence[ParamUse],
    parallel: ParallelParams,
) -> ShardedUnit:
    """Let ``unit`` shard the parameters of ``uses``.

    With ``use_orig_params=False`` they are hidden behind flat parameters.
    """
    for use in uses:
        mark_sharded(use.param, unit.name)
    refuse_running_with_shards(uses)
    buffers = UnitBuffers(
        module,
        (current for _, current in own_modules(module, ignored.modules)),
        dtype=config.mixed_precision.buffer_dtype,
        is_full_in_eval=config.full_precision_in_eval,
    )
    originals = Originals(module, unit, config, uses, parallel)
    return ShardedUnit(unit, config, originals, ignored, buffers)
