"""Which units are plain: saving and loading them is handing out and copying parameters.

A module may do more: hooks around it, methods of its own. Such code may look at the
parameters, so its unit is gathered meanwhile.
"""

from torch import nn

from fsdp_c._torch_compat import ActivationWrapper
from fsdp_c._units.base import ShardedModule
from fsdp_c._units.params import own_modules

# What may be replaced for one direction: methods, and attributes that hold hooks.
SAVING = (
    ("state_dict", "_save_to_state_dict", "get_extra_state"),
    ("_state_dict_pre_hooks", "_state_dict_hooks"),
)
LOADING = (
    ("_load_from_state_dict", "set_extra_state"),
    ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def moves_plainly(
    module: ShardedModule, direction: tuple[tuple[str, ...], tuple[str, ...]]
) -> bool:
    """Return whether the unit's modules only copy parameters, SAVING or LOADING."""
    methods, hooks = direction
    modules = {each for _, each in own_modules(module.wrapped, frozenset())}
    modules.update(use.module for use in module._sharded.uses)
    for each in modules:
        # Its own hook, in each direction, only adds or removes its prefix.
        num_known = 1 if isinstance(each, ActivationWrapper) else 0
        if sum(len(getattr(each, name)) for name in hooks) > num_known:
            return False
        cls = type(each)
        for name in methods:
            is_own = getattr(cls, name) is not getattr(nn.Module, name)
            if is_own and not cls.__module__.startswith("torch.nn.modules."):
                return False
    return True
