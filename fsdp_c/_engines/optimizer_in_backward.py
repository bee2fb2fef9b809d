"""Optimizers that step in backward, a unit at a time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from fsdp_c._torch_compat import in_backward_optimizers, remove_in_backward_hooks
from fsdp_c._units.base import ShardedModule, sharded_modules


@dataclass(frozen=True)
class FollowedUnit:
    """What an optimizer needs of one unit, of either API.

    Attributes:
        name: For messages.
        params: Those that an optimizer steps.
        has_optimizer: Whether one steps them in backward already.
        follow: Lets a function run after each reduction of the unit.
    """

    name: str
    params: Sequence[nn.Parameter]
    has_optimizer: bool
    follow: Callable[[Callable[[], object]], None]


def unit_of(module: ShardedModule) -> FollowedUnit:
    """Return the unit of a wrapped module."""
    originals = module._sharded.originals
    return FollowedUnit(
        module._sharded.name,
        list(originals.flat_params())
        or list(dict.fromkeys(use.param for use in originals.uses)),
        module.has_optimizer,
        module.follow_reductions,
    )


def step_in_backward(
    units: Iterable[FollowedUnit],
    params: list[nn.Parameter],
    build: Callable[[list[nn.Parameter]], Optimizer],
) -> Optimizer:
    """Let what ``build`` makes over ``params`` step the units in backward.

    Raises:
        TypeError: ``build`` returned no optimizer.
        ValueError: A unit has such optimizers already.
    """
    units = list(units)
    for unit in units:
        if unit.has_optimizer or adopt_in_backward_optimizers(unit):
            raise ValueError(
                f"unit {unit.name!r} has an optimizer in backward already: build one "
                "optimizer, with several groups"
            )
    optimizer = build(params)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "build must return a torch.optim.Optimizer over the parameters that it is "
            f"given, got {type(optimizer).__name__}"
        )
    for unit in units:
        step = _UnitStep(optimizer, unit.name, unit.params)
        if step.find_parts():
            unit.follow(step)
    return optimizer


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
    """Refuse ``what``, which needs the gradients of all units in ``module``.

    Raises:
        RuntimeError: A unit's optimizer steps in backward.
    """
    for each in sharded_modules(module):
        if each.has_optimizer:
            raise RuntimeError(
                f"{what} needs the gradients of all units at once, but unit "
                f"{each._sharded.name!r} steps its optimizer in backward and lets its "
                "gradients go: clip inside the optimizer, or step it after backward"
            )


class _UnitStep:
    """Steps an optimizer for the parameters of one unit."""

    def __init__(
        self, optimizer: Optimizer, name: str, params: Sequence[nn.Parameter]
    ) -> None:
        self._optimizer = optimizer
        self._name = name
        self._ids = frozenset(map(id, params))
        self._numels: list[int] = []
        self._parts: list[list[nn.Parameter]] = []

    def find_parts(self) -> bool:
        """Find the unit's parameters in each group, anew after add_param_group().

        Return whether there are any.
        """
        groups = self._optimizer.param_groups
        numels = [len(group["params"]) for group in groups]
        if numels != self._numels:
            self._numels = numels
            self._parts = [
                [param for param in group["params"] if id(param) in self._ids]
                for group in groups
            ]
        return any(self._parts)

    def __call__(self) -> None:
        """Step the unit's parameters and clear their gradients."""
        self.find_parts()
        optimizer = self._optimizer
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        before = [dict(group) for group in groups]
        try:
            for group, part in zip(groups, self._parts, strict=True):
                group["params"] = part
            optimizer.param_groups = [group for group in groups if group["params"]]
            optimizer.step()
        finally:
            optimizer.param_groups = groups
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
        for group, old in zip(groups, before, strict=True):
            for key, value in group.items():
                is_same = value is old.get(key) or value == old.get(key)
                if key != "params" and not is_same:
                    raise RuntimeError(
                        f"{type(optimizer).__name__} changes {key!r} of its "
                        f"param_groups when it steps, here once for unit "
                        f"{self._name!r}: optimizer_in_backward() is for optimizers "
                        "that treat parameters one by one; step this one after backward"
                    )
        for part in self._parts:
            for param in part:
                param.grad = None
