"""Warns when a rank's forward order differs from that of its first iteration.

Only with ``TORCH_DISTRIBUTED_DEBUG``, by Python hooks on the modules of an engine. The
comparison between ranks is native.
"""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp_c._units.base import ShardedModule

_handles: weakref.WeakKeyDictionary[ShardedModule, RemovableHandle] = (
    weakref.WeakKeyDictionary()
)


def watch_order(root: ShardedModule, modules: Sequence[ShardedModule]) -> None:
    """Warn, once, when training runs ``modules`` in another order than at first.

    The first iteration of training is the one to compare with, as in FSDP1. Replaces
    an earlier watch.
    """
    watch = _Watch(root)
    for module in modules:
        if module in _handles:
            _handles[module].remove()
        _handles[module] = module.register_forward_pre_hook(watch.note)


class _Watch:
    """The order of one engine's units, by name."""

    def __init__(self, root: ShardedModule) -> None:
        self._root = weakref.ref(root)
        # Of the first iteration; grows until the root runs again.
        self._first: list[str] = []
        self._is_known = False
        self._position = 0
        self._has_warned = False

    def note(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        assert isinstance(module, ShardedModule)
        root, engine = self._root(), module._engine
        if engine is None or root is None or root._engine is not engine:
            return  # a copy, or in another engine now
        is_training = module.wrapped.training and torch.is_grad_enabled()
        # In backward it is a recomputation.
        if self._has_warned or not is_training or engine.in_backward:
            return
        if module is root:  # whose first forward may have made the engine
            self._is_known = bool(self._first)
            self._position = 0
            return
        name = module._sharded.name
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
                f"{module.rank}. Collectives are unchecked and may give incorrect "
                "results or hang without TORCH_DISTRIBUTED_DEBUG. With it, the ranks "
                "take part in each other's collectives, or all raise an error before "
                f"the first wrong one: unit {name!r} runs where {before}",
                stacklevel=1,
            )
