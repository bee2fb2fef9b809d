"""Module conversion after wrapping: to(), half(), cuda() and the like."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from fsdp_c import _native
from fsdp_c._engines.engine import ensure_engine
from fsdp_c._engines.summon import summoned
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.device import CPU
from fsdp_c._units.keep_whole import block_numels, kept_of
from fsdp_c._units.uses import is_taken


def convert(
    module: ShardedModule, fn: Callable[[Tensor], Tensor], *, recurse: bool
) -> None:
    """Apply ``fn`` to the parameters and buffers in ``module``.

    A unit whose dtype or device ``fn`` keeps is left as it is, without communication.
    The others are gathered one at a time, converted, and sharded anew; all ranks must
    call it. Parameters, flat ones too, stay the same objects, so that an optimizer
    keeps them; its state is the user's to convert. Each rank's elements stay the same
    ones, but where a unit moves to another kind of device, which has its own alignment.
    Shards of CPU offload stay in host memory: a unit that is moved elsewhere refuses to
    run until it is moved back.
    """
    modules = list(sharded_modules(module)) if recurse else [module]
    for each in filter(_stays_on_host, modules):
        _note_device(each, fn)
    changed = [each for each in modules if _is_changed(each, fn)]
    summoned_ones = [each for each in changed if each._sharded.unit.is_summoned]
    others = [each for each in changed if each not in summoned_ones]
    for each in changed:
        _check(each, fn)
    for each in summoned_ones:
        _convert_shown(each, fn)
    for each in others:
        _convert_unit(each, fn)
    if not recurse:
        return
    with ExitStack() as stack:
        for each in modules:
            stack.enter_context(each._sharded.buffers.in_original_dtypes())
        for current in module.modules():
            _convert_unsharded(current, fn)


def _probes(module: ShardedModule) -> list[Tensor]:
    """Return empty tensors like the unit's shards, for a conversion to see.

    What it does to memory in place, such as share_memory_(), must not reach shards,
    which the engine knows by address.
    """
    return [shard.new_empty(0) for shard in module._sharded.unit.shards]


def _is_changed(module: ShardedModule, fn: Callable[[Tensor], Tensor]) -> bool:
    """Return whether ``fn`` gives tensors like the unit's shards another form."""
    if _stays_on_host(module):
        return any(fn(probe).dtype != probe.dtype for probe in _probes(module))
    return any(fn(probe) is not probe for probe in _probes(module))


def _stays_on_host(module: ShardedModule) -> bool:
    offloads = module._sharded.config.cpu_offload.offload_params
    return offloads and module.compute_device != CPU


def _note_device(module: ShardedModule, fn: Callable[[Tensor], Tensor]) -> None:
    device = next((fn(probe).device for probe in _probes(module)), CPU)
    moved_to = None if device == CPU else device
    if moved_to != module._moved_to:
        _check(module, fn)
        module.note_move(moved_to)


def _check(module: ShardedModule, fn: Callable[[Tensor], Tensor]) -> None:
    is_summoned = module._sharded.unit.is_summoned
    rounds = any(fn(probe).dtype != probe.dtype for probe in _probes(module))
    if module.is_in_step or (is_summoned and rounds):
        raise RuntimeError(
            f"unit {module._sharded.name!r} cannot be converted inside forward, "
            "backward or summon_full_params(), where to() may only move whole "
            "parameters to another device: call to(), half(), cuda() between steps"
        )
    if is_summoned:
        return
    own = [*(use.param for use in module._sharded.uses), *module.parameters()]
    if any(param.grad is not None for param in own):
        raise RuntimeError(
            f"unit {module._sharded.name!r} has gradients, which would not fit its "
            "converted parameters: call zero_grad() before to(), half(), cuda()"
        )


def _convert_shown(module: ShardedModule, fn: Callable[[Tensor], Tensor]) -> None:
    """Move the whole parameters of a summoned unit, as long as it is summoned.

    With ``writeback`` the unit takes what is written to them there.
    """
    with torch.no_grad():
        for param in dict.fromkeys(use.param for use in module._sharded.uses):
            param.data = fn(param.data)


def _convert_unit(module: ShardedModule, fn: Callable[[Tensor], Tensor]) -> None:
    params = [use.param for use in module._sharded.uses]
    converted: dict[nn.Parameter, Tensor] = {}
    ensure_engine(module)
    with torch.no_grad(), summoned(module, writeback=False):
        for param in dict.fromkeys(params):
            data = param.detach()
            result = fn(data)
            if _stays_on_host(module):
                result = result.to(module.compute_device)
            if result.untyped_storage().data_ptr() == data.untyped_storage().data_ptr():
                result = result.clone()  # the summoned memory goes
            converted[param] = result
    devices = {result.device for result in converted.values()}
    if len(devices) > 1:
        places = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"the conversion puts parameters of unit {module._sharded.name!r} on "
            f"several devices ({places}): move all of them to one"
        )
    device = devices.pop()
    config, name = module._sharded.config, module._sharded.name
    is_parallel = bool(module._sharded.originals.parallel)
    kept = [kept_of(use.module, use.name) for use in module._sharded.uses]
    blocks = block_numels(kept, config.groups.num_shards)
    stays = device.type == module.compute_device.type
    layout = module._sharded.unit.layout if stays else None
    flat_params = list(module._sharded.originals.flat_params())
    trained = [param.requires_grad for param in flat_params]
    module.release_engine()

    def make_unit() -> _native.Unit:
        for param, result in converted.items():
            param.data = result
        return config.make_unit(
            name,
            params,
            device,
            is_parallel=is_parallel,
            block_numels=blocks,
            like=layout,
        )

    module.replace_unit(make_unit)
    for flat_param, is_trained in zip(flat_params, trained, strict=True):
        flat_param.requires_grad_(is_trained)  # it may have changed since wrapping
    module.compute_device = device


def _convert_unsharded(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    for param in module._parameters.values():
        if param is not None and not is_taken(param):
            with torch.no_grad():
                param.data = fn(param.data)
                if param.grad is not None:
                    param.grad.data = fn(param.grad.data)
