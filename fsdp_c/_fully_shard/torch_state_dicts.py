"""What torch.distributed.checkpoint.state_dict gets wrong for models of fully_shard().

* Of a module with several names it knows only the first. The state dict has all names,
  so under the others it loads plain tensors into DTensors, which fails.
* With ``full_state_dict`` and ``flatten_optimizer_state_dict`` it compares the flat
  state that it is to load with the names of another flat state, which fails.
* From whole tensors it cannot take parts of different sizes that tensor parallel ranks
  cut along the same dimension, too.
* It finds the names of optimizer state by the registered parameters, which are not the
  sharded ones while a module keeps its whole ones for backward.
* Of whole tensors it makes plain ones, also where the optimizer keeps 8-bit ones.

And what is slow: it gathers full state dicts tensor by tensor.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_c._fully_shard.group import group_of, groups_in
from fsdp_c._fully_shard.rows import part_of
from fsdp_c._fully_shard.whole_rows import with_whole_rows
from fsdp_c._state.optim.classes import keeping_classes
from fsdp_c._torch_compat import checkpoint_state_dict, is_strided, state_dict_utils
from fsdp_c._units.cuts import as_dtensor


@functools.cache
def correct_state_dicts() -> None:
    """Correct all of the above, once per process.

    The correction for tensor parallel ranks applies to every model, the others only to
    models of fully_shard().
    """
    checkpoint = checkpoint_state_dict()
    iterate = checkpoint._iterate_valid_model_state
    load = checkpoint._load_optim_state_dict
    make_full = checkpoint._maybe_full_or_cpu_state_dict

    @functools.wraps(iterate)
    def iterate_all_names(
        model: nn.Module, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, Any]]:
        seen = set()
        for name, value in iterate(model, *args, **kwargs):
            seen.add(name)
            yield name, value
        if not _is_ours(model):
            return
        modules: set[nn.Module] = set()
        for prefix, module in model.named_modules(remove_duplicate=False):
            others = _twice(module)
            if module in modules:
                others = {**dict(iterate(module, *args, **kwargs)), **others}
            modules.add(module)
            for name, value in others.items():
                full = f"{prefix}.{name}" if prefix else name
                if full not in seen:
                    seen.add(full)
                    yield full, value

    verify = checkpoint._verify_options

    @functools.wraps(verify)
    def verify_sharded(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for group in groups_in(model):
            group.hide_kept()
        return verify(model, *args, **kwargs)

    @functools.wraps(load)
    def load_flat(model: nn.Module, optims: Any, state_dict: Any, info: Any) -> Any:
        if not _is_ours(model):
            return load(model, optims, state_dict, info)
        # The loaded state itself shows whether it is flat.
        info = replace(info, flatten_optimizer_state_dict=False)
        for optim in optims if info.handle_optim else ():
            checkpoint._init_optim_state(optim)
        with ExitStack() as stack:
            for optim in optims:
                stack.enter_context(keeping_classes(optim))
            result = load(model, optims, state_dict, info)
        for optim in optims if info.handle_optim else ():
            _unshare_steps(optim)
        return result

    @functools.wraps(make_full)
    def make_full_at_once(state_dict: Any, info: Any) -> Any:
        if info.full_state_dict and dist.is_initialized():
            # Who gets it is torch's decision.
            first = 0 if info.cpu_offload else None
            state_dict = with_whole_rows(state_dict, first)
        return make_full(state_dict, info)

    distribute = checkpoint._distribute_state_dict
    utils = state_dict_utils()
    distribute_broadcast = utils._distribute_tensors

    @functools.wraps(distribute)
    def distribute_uneven(
        full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        done = {}
        for name, value in full.items():
            like = local.get(name)
            if isinstance(like, DTensor) and _is_strided(like):
                done[name] = _distributed(value.to(like.device), like)
        rest = {name: value for name, value in full.items() if name not in done}
        distribute(rest, local, *args, **kwargs)
        local.update(done)

    @functools.wraps(distribute_broadcast)
    def distribute_broadcast_uneven(
        local: dict[str, Any], keys: Sequence[str], *args: Any, **kwargs: Any
    ) -> None:
        for key in keys:
            pair = local.get(key)
            if isinstance(pair, tuple) and _is_strided(pair[0]):
                local[key] = _distributed(pair[1], pair[0])
        distribute_broadcast(local, keys, *args, **kwargs)

    utils._distribute_tensors = distribute_broadcast_uneven
    checkpoint._distribute_state_dict = distribute_uneven
    checkpoint._maybe_full_or_cpu_state_dict = make_full_at_once
    checkpoint._iterate_valid_model_state = iterate_all_names
    checkpoint._load_optim_state_dict = load_flat
    checkpoint._verify_options = verify_sharded


def _unshare_steps(optim: torch.optim.Optimizer) -> None:
    """Give each parameter a step of its own.

    In a state dict of torch's FSDP1 the parameters of a flat one have the same tensor,
    also after ``torch.load()``, and each of them would count in it.
    """
    known: set[int] = set()
    for state in optim.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 0:
                if id(value) in known:
                    state[name] = value.clone()
                known.add(id(value))


def _is_strided(value: DTensor) -> bool:
    return any(map(is_strided, value.placements))


def _distributed(whole: Tensor, like: DTensor) -> DTensor:
    """Return this rank's part of ``whole``, placed as ``like``."""
    part = part_of(whole, like.device_mesh, like.placements)
    return as_dtensor(part, like.shape, like.device_mesh, like.placements)


def _is_ours(model: nn.Module) -> bool:
    return any(group_of(module) is not None for module in model.modules())


def _twice(module: nn.Module) -> dict[str, Any]:
    """Return the parameters of which ``module`` itself has one under several names."""
    params = {name: p for name, p in module._parameters.items() if p is not None}
    return params if len(set(params.values())) < len(params) else {}
