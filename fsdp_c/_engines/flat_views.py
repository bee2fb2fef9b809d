"""Read-only flat parameters of units with use_orig_params=True.

Such a unit registers no flat parameter. What FSDP1 shows as ``_handle.flat_param`` is a
view, made on request. As in FSDP1 it stays the same object while somebody holds it, and
is unsharded, with padding, inside summon_full_params; elsewhere ``grad`` is a view of
the sharded gradient.
"""

import weakref

import torch

from fsdp_c._units.base import ShardedModule
from fsdp_c._units.originals import FlatParameter

# By module, one per segment; dead ones are made again.
_views: weakref.WeakKeyDictionary[ShardedModule, "list[weakref.ref[FlatParameter]]"] = (
    weakref.WeakKeyDictionary()
)


def flat_views(module: ShardedModule) -> list[FlatParameter]:
    """Return one view of each segment."""
    views = module._sharded.originals.make_flat_params()
    old = [each() for each in _views.get(module, [])]
    if len(old) == len(views):
        for index, view in enumerate(old):
            if view is not None:
                view.become(views[index])
                views[index] = view
    _views[module] = [weakref.ref(view) for view in views]
    _show(module, views)
    return views


def follow_summon(module: ShardedModule) -> None:
    """Update the views that somebody holds, when a summon starts or ends."""
    if any(each() is not None for each in _views.get(module, [])):
        flat_views(module)


def _show(module: ShardedModule, views: list[FlatParameter]) -> None:
    """Make the views unsharded while the unit's parameters are."""
    unit = module._sharded.unit
    if not unit.is_summoned:
        _show_grads(module, views)
        return
    slots, segments = unit.slots, unit.segments
    for use in module._sharded.uses:
        segment, _, numel = slots[use.slot]
        padded_numel = segments[segment][5]
        param, view = use.param.detach(), views[segment]
        nbytes = padded_numel * param.element_size()
        # With rank0_only the other ranks keep their shards.
        if numel > 0 and param.untyped_storage().nbytes() == nbytes:
            view.data = torch.as_strided(param, (padded_numel,), (1,), 0)


def _show_grads(module: ShardedModule, views: list[FlatParameter]) -> None:
    """Set the gradients of the views, over those of the parameters."""
    slots = module._sharded.unit.slots
    for view in views:
        view.grad = None
    for use in module._sharded.uses:
        view, grad = views[slots[use.slot][0]], use.param.grad
        nbytes = view.numel() * view.element_size()
        if (
            grad is not None
            and grad.numel() > 0
            and grad.dtype == view.dtype
            and grad.untyped_storage().nbytes() == nbytes
        ):
            view.grad = torch.as_strided(grad, (view.numel(),), (1,), 0)
