"""Optimizers that step in backward, for models of either API."""

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from fsdp_c._engines.optimizer_in_backward import step_in_backward, unit_of
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
    return step_in_backward(units, list(model.parameters()), build)
