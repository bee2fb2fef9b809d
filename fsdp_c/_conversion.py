"""Module conversion after wrapping: to(), half(), cuda() and the like."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsdp_c._base import ShardedModule, sharded_modules
from fsdp_c._uses import is_flat_param, sharding_unit


def convert(
    module: ShardedModule, fn: Callable[[Tensor], Tensor], *, recurse: bool
) -> None:
    """Apply ``fn`` to buffers and unsharded parameters, if it spares the shards.

    Nothing is changed unless ``fn`` returns every shard as it is.

    Raises:
        RuntimeError: ``fn`` would move or convert sharded parameters.
    """
    for each in sharded_modules(module) if recurse else [module]:
        for shard in each._unit.shards:
            if fn(shard) is not shard:
                raise RuntimeError(
                    f"the parameters of unit {each._unit.name!r} are sharded on "
                    f"{shard.device} in {shard.dtype} and cannot be moved or "
                    "converted: call to(), half(), cuda() and the like before "
                    "wrapping; for another compute dtype pass mixed_precision"
                )
    if recurse:
        for current in module.modules():
            _convert_unsharded(current, fn)


def _convert_unsharded(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    for param in module._parameters.values():
        if (
            param is not None
            and sharding_unit(param) is None
            and not is_flat_param(param)
        ):
            with torch.no_grad():
                param.data = fn(param.data)
                if param.grad is not None:
                    param.grad.data = fn(param.grad.data)
