"""Which units an optimizer steps in backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from fsdp_c._torch_compat import in_backward_optimizers, remove_in_backward_hooks
from fsdp_c._units.base import ShardedModule, sharded_modules


@dataclass(frozen=True)
class FollowedUnit:
    """What an optimizer needs of one unit, of either API."""

    name: str  # for messages
    params: Sequence[nn.Parameter]  # those that an optimizer steps
    has_optimizer: bool  # one steps them in backward already
    # Lets a function run after each reduction of the unit.
    follow: Callable[[Callable[[], object]], None]


def unit_of(module: ShardedModule) -> FollowedUnit:
    originals = module._sharded.originals
    return FollowedUnit(
        module._sharded.name,
        list(originals.flat_params())
        or list(dict.fromkeys(use.param for use in originals.uses)),
        module.has_optimizer,
        module.follow_reductions,
    )


def adopt_in_backward_optimizers(unit: FollowedUnit) -> bool:
    """Run what torch's ``_apply_optimizer_in_backward`` left on parameters.

    Its own hooks would step whole parameters with gradients that are not reduced, or
    sharded ones never. Return whether there was anything.
    """
    if unit.has_optimizer:
        return False
    params = [param for param in unit.params if in_backward_optimizers(param)]
    if not params:
        return False
    for param in params:
        remove_in_backward_hooks(param)

    def step() -> None:
        for param in params:
            for optimizer in in_backward_optimizers(param):
                if param.grad is not None:
                    optimizer.step()
            param.grad = None

    unit.follow(step)
    return True


def check_no_optimizer(module: ShardedModule, what: str) -> None:
    """Refuse ``what`` if the optimizer of a unit in ``module`` steps in backward."""
    for each in sharded_modules(module):
        if each.has_optimizer:
            raise RuntimeError(
                f"{what} needs the gradients of all units at once, but unit "
                f"{each._sharded.name!r} steps its optimizer in backward and lets its "
                "gradients go: clip inside the optimizer, or step it after backward"
            )
