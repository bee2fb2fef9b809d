"""Which units are plain: saving and loading them is handing out and copying parameters.

A module may do more: hooks around it, methods of its own. Such code may look at the
parameters, so its unit is gathered meanwhile.
"""

from collections.abc import Iterable
from operator import attrgetter

from torch import nn

from fsdp_c._torch_compat import ActivationWrapper
from fsdp_c._units.base import ShardedModule

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
    module: ShardedModule,
    own: Iterable[nn.Module],
    direction: tuple[tuple[str, ...], tuple[str, ...]],
) -> bool:
    """Return whether the unit's modules only copy parameters, SAVING or LOADING.

    ``own`` are the modules in ``module`` without those of nested units.
    """
    methods, hooks = direction
    modules = {*own, *[use.module for use in module._sharded.uses]}
    hooks_of = attrgetter(*hooks)
    for each in [each for each in modules if any(hooks_of(each))]:
        # Its own hook, in each direction, only adds or removes its prefix.
        num_known = 1 if isinstance(each, ActivationWrapper) else 0
        if sum(map(len, hooks_of(each))) > num_known:
            return False
    for cls in {type(each) for each in modules}:
        for name in methods:
            is_own = getattr(cls, name) is not getattr(nn.Module, name)
            if is_own and not cls.__module__.startswith("torch.nn.modules."):
                return False
    return True
