"""Which modules and parameters a wrapped module leaves alone."""

import warnings

from torch import nn

from fsdp_c._units.base import Ignored, ShardedModule, sharded_modules
from fsdp_c._units.config import Config
from fsdp_c._units.uses import is_flat_param


def find_ignored(module: nn.Module, config: Config) -> Ignored:
    """Return what ``config`` and the wrapped modules in ``module`` ignore.

    Source:
        ``_get_ignored_modules``, ``_get_ignored_params`` (torch 2.13,
        ``fsdp/_init_utils.py``).
    """
    modules: set[nn.Module] = set()
    params = set(config.ignored_params)
    for ignored in config.ignored_modules:
        if isinstance(ignored, ShardedModule):
            raise ValueError(
                "an ignored module is wrapped in FullyShardedDataParallel itself: "
                "name the module inside it, before wrapping"
            )
        modules.update(m for m in ignored.modules() if not isinstance(m, ShardedModule))
    if module in modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor "
            "itself will result in all parameters being ignored: name the modules "
            "inside it instead",
            stacklevel=4,
        )
    for nested in sharded_modules(module):
        modules |= nested._sharded.ignored.modules
        params |= nested._sharded.ignored.params
    for ignored in modules:
        params.update(p for p in ignored.parameters() if not is_flat_param(p))
    return Ignored(frozenset(modules), frozenset(params))
