"""Warns when a rank's forward order differs from that of its first iteration.

Only with ``TORCH_DISTRIBUTED_DEBUG``, for the engines of both APIs: each unit tells of
its forwards. The comparison between ranks is native.
"""

import functools
import warnings
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp_c import _native
from fsdp_c._torch_compat import interpreted_with_callees
from fsdp_c._units.owner import Owner


def watch_order(owned: Sequence[tuple[Owner, _native.Unit]]) -> None:
    """Warn, once, when training runs units in another order than at first.

    The first iteration of training is the one to compare with, as in FSDP1. Replaces
    an earlier watch.

    Args:
        owned: The owners and units of one engine, its root first. An iteration begins
            where the root runs; of several modules none does it.
    """
    root, its_unit = owned[0]
    if len(root.unit_modules) > 1:
        return
    watch = _Watch(its_unit.name)
    for owner, unit in owned:
        note = functools.partial(watch.note, unit.name, weakref.ref(owner))
        unit.note_forwards(note)


class _Watch:
    """The order of one engine's units, by name."""

    def __init__(self, root: str) -> None:
        self._root = root
        # Of the first iteration; grows until the root runs again.
        self._first: list[str] = []
        self._is_known = False
        self._position = 0
        self._has_warned = False

    @interpreted_with_callees
    def note(self, name: str, ref: "weakref.ref[Owner]") -> None:
        """A forward of the unit begins."""
        owner = ref()
        engine = None if owner is None else owner._engine
        if self._has_warned or owner is None or engine is None:
            return
        is_training = owner.unit_modules[0].training and torch.is_grad_enabled()
        # In backward it is a recomputation.
        if not is_training or engine.in_backward:
            return
        if name == self._root:
            self._is_known = bool(self._first)
            self._position = 0
            return
        if not self._is_known:
            self._first.append(name)
            return
        expected = self._first[self._position : self._position + 1]
        self._position += 1
        if expected != [name]:
            self._has_warned = True
            before = f"unit {expected[0]!r} ran" if expected else "no other ran"
            warnings.warn(
                "Forward order differs from that of the first iteration on rank "
                f"{dist.get_rank()}. Collectives are unchecked and may give incorrect "
                "results or hang without TORCH_DISTRIBUTED_DEBUG. With it, the ranks "
                "take part in each other's collectives, or all raise an error before "
                f"the first wrong one: unit {name!r} runs where {before}",
                stacklevel=1,
            )
