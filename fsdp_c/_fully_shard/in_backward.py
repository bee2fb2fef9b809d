"""Optimizers that step in backward, for models of either API."""

from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from fsdp_c._engines.optimizer_in_backward import adopt_in_backward_optimizers, unit_of
from fsdp_c._fully_shard.group import groups_in
from fsdp_c._units.base import require_sharded


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
        ValueError: Nothing in ``model`` is sharded, or it has such optimizers already.

    Example:
        >>> optimizer = fsdp_c.optimizer_in_backward(  # doctest: +SKIP
        ...     model, lambda params: torch.optim.AdamW(params, lr=1e-4)
        ... )
        >>> model(batch).sum().backward()  # steps  # doctest: +SKIP
    """
    groups = groups_in(model) if isinstance(model, nn.Module) else {}
    for group in groups:
        group.hide_kept()  # parameters() is to be the sharded ones
    units = [group.followed(name) for group, name in groups.items()] or [
        unit_of(module) for module in require_sharded(model)
    ]
    for unit in units:
        if unit.has_optimizer or adopt_in_backward_optimizers(unit):
            raise ValueError(
                f"unit {unit.name!r} has an optimizer in backward already: build one "
                "optimizer, with several groups"
            )
    optimizer = build(list(model.parameters()))
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
