"""Flat parameters to look at, for units with use_orig_params=True.

Such a unit registers none: what FSDP1 shows under ``_handle.flat_param`` are views,
made when somebody asks. As in FSDP1 they stay the same objects as long as somebody
holds them, and are whole, padding included, inside summon_full_params.
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
    new = module._originals.make_flat_params()
    old: list[FlatParameter | None] = [each() for each in _views.get(module, [])]
    if len(old) != len(new):
        old = [None] * len(new)
    views = []
    for view, made in zip(old, new, strict=True):
        if view is not None:
            view.become(made)
        views.append(made if view is None else view)
    _views[module] = [weakref.ref(view) for view in views]
    _show(module, views)
    return views


def follow_summon(module: ShardedModule) -> None:
    """Let the views that somebody holds follow the start or the end of a summon."""
    if any(each() is not None for each in _views.get(module, [])):
        flat_views(module)


def _show(module: ShardedModule, views: list[FlatParameter]) -> None:
    """Make the views whole where the unit's parameters are."""
    unit = module._unit
    if not unit.is_summoned:
        return
    uses = module._originals.uses
    params = {
        index: use.param for index, use in zip(unit.param_of_use, uses, strict=True)
    }
    for index, (segment, _, numel) in enumerate(unit.slots):
        padded_numel = unit.segments[segment][5]
        param, view = params[index].detach(), views[segment]
        nbytes = padded_numel * param.element_size()
        # Ranks to which rank0_only shows nothing have their shards.
        if numel > 0 and param.untyped_storage().nbytes() == nbytes:
            view.data = torch.as_strided(param, (padded_numel,), (1,), 0)
