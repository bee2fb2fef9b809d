"""Optimizers that step in backward, for models of either API."""

from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from fsdp_c._torch_compat import in_backward_optimizers, remove_in_backward_hooks
from fsdp_c._units.base import ShardedModule, require_owners, sharded_modules
from fsdp_c._units.owner import Owner


def adopt_in_backward_optimizers(owner: Owner) -> bool:
    """Run what torch's ``_apply_optimizer_in_backward`` left on parameters.

    Its own hooks would step whole parameters with gradients that are not reduced, or
    sharded ones never. Return whether there was anything.
    """
    if owner.has_optimizer:
        return False
    params = [each for each in owner.stepped_params() if in_backward_optimizers(each)]
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

    owner.follow_reductions(step)
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


def optimizer_in_backward(
    model: nn.Module, build: Callable[[list[nn.Parameter]], Optimizer]
) -> Optimizer:
    """Let an optimizer step each unit in backward, as soon as it is reduced.

    A unit's gradients are freed after its step, so gradients take the memory of one
    unit, not of the model. Under ``no_sync()`` nothing steps; the backward that
    reduces does, with the sum.

    The optimizer is a usual one, over all parameters: learning rate schedulers and
    state dicts take it. Parameters outside any unit (ignored ones) keep
    their gradients, which its own ``step()`` takes, after backward.

    The whole gradient exists at no time. So FSDP's ``clip_grad_norm_`` is refused,
    torch's finds no gradients, and a ``GradScaler`` cannot unscale: use bf16.

    Args:
        model: A wrapped module, or one that contains wrapped modules; likewise of
            fully_shard().
        build: Is given ``list(model.parameters())`` and returns the optimizer over
            them, or over some of them, in any groups. It must treat parameters one
            by one: not count steps in ``param_groups``, not need a closure.

    Returns:
        What ``build`` returned.

    Raises:
        TypeError: ``build`` returned no optimizer.
        ValueError: Nothing in ``model`` is sharded, it has such optimizers already, or
            ``build`` returned a :class:`fsdp_c.WholeParameterOptimizer`.

    Example:
        >>> optimizer = fsdp_c.optimizer_in_backward(  # doctest: +SKIP
        ...     model, lambda params: torch.optim.AdamW(params, lr=1e-4)
        ... )
        >>> model(batch).sum().backward()  # steps  # doctest: +SKIP
    """
    owners = require_owners(model)
    for owner, name in owners.items():
        if owner.has_optimizer or adopt_in_backward_optimizers(owner):
            raise ValueError(
                f"unit {owner.unit_name(name)!r} has an optimizer in backward already: "
                "build one optimizer, with several groups"
            )
    params = {owner: owner.stepped_params() for owner in owners}
    optimizer = build(list(model.parameters()))
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "build must return a torch.optim.Optimizer over the parameters that it is "
            f"given, got {type(optimizer).__name__}"
        )
    if getattr(optimizer, "steps_wholes", False):
        raise ValueError(
            "build returned a whole_parameter_optimizer, which steps after backward: "
            "make it without optimizer_in_backward"
        )
    for owner, name in owners.items():
        step = _UnitStep(optimizer, owner.unit_name(name), params[owner])
        if step.find_parts():
            owner.follow_reductions(step)
    return optimizer


class _UnitStep:
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
                        "param_groups in each step, which here means once per unit "
                        f"({self._name!r}): optimizer_in_backward() is for optimizers "
                        "that treat parameters one by one; step this one after backward"
                    )
        for part in self._parts:
            for param in part:
                param.grad = None
