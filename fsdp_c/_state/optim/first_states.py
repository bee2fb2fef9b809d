"""The first states of an optimizer: made on all ranks, or on none.

torch.distributed.checkpoint.state_dict steps an optimizer without states, with zeros
for gradients, so that the state dict has the names of all of them. It looks at this
rank's optimizer alone. With original parameters a rank has no states if what it holds
was never stepped: frozen parameters, parts of modules that did not run, padding. Other
ranks have states of theirs then, and none of these parameters.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fsdp_c._torch_compat import checkpoint_state_dict
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.collectives import on_any_rank


@functools.cache
def make_first_states_together() -> None:
    """Let torch make no states where another rank has some, once per process."""
    checkpoint = checkpoint_state_dict()
    save, make = checkpoint._get_optim_state_dict, checkpoint._init_optim_state
    begun: list[Optimizer] = []

    @functools.wraps(make)
    def make_unless_begun(optim: Optimizer) -> None:
        if all(optim is not each for each in begun):
            make(optim)

    @functools.wraps(save)
    def save_together(model: nn.Module, optimizers: Any, info: Any) -> Any:
        if info.handle_optim and info.fsdp_modules:
            begun.extend(_begun_on_any_rank(model, optimizers))
        try:
            return save(model, optimizers, info)
        finally:
            begun.clear()

    checkpoint._init_optim_state = make_unless_begun
    checkpoint._get_optim_state_dict = save_together


def _begun_on_any_rank(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> list[Optimizer]:
    """Return the optimizers that have states or gradients somewhere. Collective."""
    flags = [bool(each.state) or _has_gradients(each) for each in optimizers]
    groups: dict[Any, ShardedModule] = {}
    for module in sharded_modules(model):
        groups.setdefault(module._sharded.groups.shard_group, module)
    for group, module in groups.items():
        if group is not None:
            what = "search for optimizer states"
            flags = on_any_rank(flags, group, module.compute_device, what)
    return [each for each, flag in zip(optimizers, flags, strict=True) if flag]


def _has_gradients(optim: Optimizer) -> bool:
    """Whether torch would make no states of it: some parameter has a gradient."""
    params = (param for group in optim.param_groups for param in group["params"])
    return any(param.grad is not None for param in params)
