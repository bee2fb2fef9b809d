"""What torch.distributed.checkpoint.state_dict gets wrong for models of fully_shard().

* It takes the first name only of a module that has several. The state dict has all of
  them, so it loads a full one as plain tensors into DTensors, which fails.
* With ``full_state_dict`` and ``flatten_optimizer_state_dict`` it compares the flat
  state that it is to load with the names of another flat state, which fails.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from fsdp_c._fully_shard.group import group_of
from fsdp_c._torch_compat import checkpoint_state_dict


@functools.cache
def correct_state_dicts() -> None:
    """Put that right, once, and only for models that fully_shard() was called on."""
    checkpoint = checkpoint_state_dict()
    iterate = checkpoint._iterate_valid_model_state
    load = checkpoint._load_optim_state_dict

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

    @functools.wraps(load)
    def load_flat(model: nn.Module, optims: Any, state_dict: Any, info: Any) -> Any:
        if _is_ours(model):
            # It is to be seen in what is loaded whether that is flat.
            info = replace(info, flatten_optimizer_state_dict=False)
        return load(model, optims, state_dict, info)

    checkpoint._iterate_valid_model_state = iterate_all_names
    checkpoint._load_optim_state_dict = load_flat


def _is_ours(model: nn.Module) -> bool:
    return any(group_of(module) is not None for module in model.modules())


def _twice(module: nn.Module) -> dict[str, Any]:
    """Return the parameters of which ``module`` itself has one under several names."""
    params = {name: p for name, p in module._parameters.items() if p is not None}
    return params if len(set(params.values())) < len(params) else {}
