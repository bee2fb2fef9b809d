"""Warns when a rank's forward order differs from that of its first iteration.

Only with ``TORCH_DISTRIBUTED_DEBUG``, for the engines of both APIs: each unit tells of
its forwards. The comparison between ranks is native.
"""

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsdp_c import _native
from fsdp_c._torch_compat import interpreted_with_callees


def watch_order(
    units: Sequence[tuple[_native.Unit, nn.Module]],
    engine_of: Callable[[], _native.Engine | None],
) -> None:
    """Warn, once, when training runs units in another order than at first.

    The first iteration of training is the one to compare with, as in FSDP1. Replaces
    an earlier watch.

    Args:
        units: Of one engine, its root first, each with a module of it. An iteration
            begins where the root runs.
        engine_of: Returns the engine that the root has now.
    """
    watch = _Watch(units[0][0].name, engine_of)
    for unit, module in units:
        note = functools.partial(watch.note, unit.name, weakref.ref(module))
        unit.note_forwards(note)


class _Watch:
    """The order of one engine's units, by name."""

    def __init__(
        self, root: str, engine_of: Callable[[], _native.Engine | None]
    ) -> None:
        self._root = root
        self._engine_of = engine_of
        # Of the first iteration; grows until the root runs again.
        self._first: list[str] = []
        self._is_known = False
        self._position = 0
        self._has_warned = False

    @interpreted_with_callees
    def note(self, name: str, ref: "weakref.ref[nn.Module]") -> None:
        """A forward of the unit begins."""
        module, engine = ref(), self._engine_of()
        if self._has_warned or module is None or engine is None:
            return
        is_training = module.training and torch.is_grad_enabled()
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
