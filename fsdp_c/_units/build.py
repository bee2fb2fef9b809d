"""Builds the unit of a module: its parameters on their device, then sharded."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_c import _native
from fsdp_c._units.base import Ignored, ShardedUnit
from fsdp_c._units.buffers import UnitBuffers
from fsdp_c._units.config import Config
from fsdp_c._units.cuts import local_of
from fsdp_c._units.materialize import materialize
from fsdp_c._units.originals import Originals
from fsdp_c._units.parallel import ParallelParams, localize
from fsdp_c._units.params import collect_uses, move_to_device, own_modules
from fsdp_c._units.sync import broadcast_from_first
from fsdp_c._units.uses import ParamUse, mark_sharded


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
            tensors += (
                local_of(buffer) if isinstance(buffer, DTensor) else buffer
                for buffer in current.buffers(recurse=False)
            )
        broadcast_from_first(tensors, config.groups.process_group)
        if config.groups.inter_node_group is not None:
            broadcast_from_first(tensors, config.groups.inter_node_group)
    unit = config.make_unit(name, params, device, is_parallel=bool(cuts))
    return take_unit(module, unit, config, ignored, uses, parallel)


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
    buffers = UnitBuffers(
        module,
        (current for _, current in own_modules(module, ignored.modules)),
        dtype=config.mixed_precision.buffer_dtype,
        is_full_in_eval=config.full_precision_in_eval,
    )
    originals = Originals(module, unit, config, uses, parallel)
    return ShardedUnit(unit, config, originals, ignored, buffers)
