"""Read-only flat parameters of units with use_orig_params=True.

Such a unit registers no flat parameter. What FSDP1 shows as ``_handle.flat_param`` is a
view, made on request. As in FSDP1 it stays the same object while somebody holds it, and
is unsharded, with padding, inside summon_full_params; elsewhere ``grad`` is a view of
the sharded gradient.
"""

import weakref

import torch

from fsdp_c._engines.away import shard_of
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
    for segment, view in enumerate(views):
        view.data = shard_of(module, segment)
    _views[module] = [weakref.ref(view) for view in views]
    _show(module, views)
    return views


def follow_summon(module: ShardedModule) -> None:
    """Update the views that somebody holds, when a summon starts or ends."""
    if any(each() is not None for each in _views.get(module, [])):
        flat_views(module)


def _show(module: ShardedModule, views: list[FlatParameter]) -> None:
    """Let the views be unsharded in a summon; else show the sharded gradients."""
    unit = module._sharded.unit
    slots, segments = unit.slots, unit.segments
    for view in [] if unit.is_summoned else views:
        view.grad = None
    for use in module._sharded.uses:
        segment = slots[use.slot][0]
        view = views[segment]
        shown: torch.Tensor | None
        if unit.is_summoned:
            shown, numel = use.param.detach(), segments[segment][5]
        else:
            shown, numel = use.param.grad, view.numel()
        # With rank0_only the other ranks keep their shards.
        if (
            shown is not None
            and shown.numel() > 0
            and shown.dtype == view.dtype
            and shown.untyped_storage().nbytes() == numel * shown.element_size()
        ):
            flat = torch.as_strided(shown, (numel,), (1,), 0)
            if unit.is_summoned:
                view.data = flat
            else:
                view.grad = flat
