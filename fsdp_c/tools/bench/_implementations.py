"""The ways to train a model on several ranks that are compared."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c._fsdp1.sharded_module import FullyShardedDataParallel
from fsdp_c._fully_shard.api import fully_shard
from fsdp_c.tools.bench._workload import Block

OURS, OURS_FULLY = "fsdp_c", "fsdp_c fully_shard"
FSDP1, FSDP2, DDP = "torch FSDP1", "torch FSDP2", "torch DDP"
IMPLEMENTATIONS = (OURS, OURS_FULLY, FSDP1, FSDP2, DDP)

# The destructor of a DDP may hang: see end_rank() in _processes.
_kept: list[nn.Module] = []


def parallelise(
    model: nn.Module,
    name: str,
    device: torch.device,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    mesh: DeviceMesh | None = None,
    use_orig_params: bool = True,
    offloads: bool = False,
) -> nn.Module:
    """Return ``model`` run by an implementation, one unit per ``Block``; it is used up.

    Args:
        model: On any device.
        name: Of ``IMPLEMENTATIONS``.
        device: Where it trains.
        param_dtype: Of forward and backward; None: that of the parameters. DDP has
            none: use autocast.
        reduce_dtype: Of the gradients' reduction, with ``param_dtype``.
        mesh: (replicate, shard), for HYBRID_SHARD; None: shards over all ranks.
        use_orig_params: Of the FSDP1 API.
        offloads: Whether shards and their gradients are in host memory. Not with DDP.
    """
    if name in (OURS, FSDP1):
        wrapper: Any = FullyShardedDataParallel
        if name == FSDP1:
            wrapper = fsdp.FullyShardedDataParallel
        precision = fsdp.MixedPrecision(param_dtype, reduce_dtype)
        strategies = fsdp.ShardingStrategy
        wrapped: nn.Module = wrapper(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=strategies.HYBRID_SHARD if mesh else None,
            device_mesh=mesh,
            mixed_precision=precision if param_dtype else None,
            cpu_offload=fsdp.CPUOffload(offload_params=offloads),
            use_orig_params=use_orig_params,
            device_id=device,
        )
        return wrapped
    if not offloads:
        model = model.to(device)
    if name in (OURS_FULLY, FSDP2):
        shard: Any = fully_shard if name == OURS_FULLY else fsdp.fully_shard
        options: dict[str, Any] = {
            "mesh": mesh or init_device_mesh(device.type, (dist.get_world_size(),)),
            "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype, reduce_dtype),
        }
        if offloads:
            options["offload_policy"] = fsdp.CPUOffloadPolicy()
        for module in model.modules():
            if isinstance(module, Block):
                shard(module, **options)
        shard(model, **options)
        return model
    assert name == DDP
    _kept.append(nn.parallel.DistributedDataParallel(model))
    return _kept[-1]
