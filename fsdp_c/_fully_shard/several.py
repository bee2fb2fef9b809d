"""Modules of one call: their parameters stay until the last of them has run."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from fsdp_c._torch_compat import interpreted_with_callees


class Runs:
    """Which of a group's modules have yet to run in this forward."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = frozenset(modules)
        self._missing: set[nn.Module] = set()

    def begin(self, module: nn.Module) -> bool:
        """Note that ``module`` runs now, and return whether it is the last."""
        self._missing = self._missing or set(self._modules)
        self._missing.discard(module)
        return not self._missing

    def end(self) -> bool:
        """Start anew, and return whether some had run but not all."""
        was_open, self._missing = bool(self._missing), set()
        return was_open


@interpreted_with_callees
def end_runs(groups: Iterable["weakref.ref[Any]"]) -> None:
    """After the root's forward: reshard groups of which some module did not run."""
    for ref in groups:
        group = ref()
        if group is None or group.is_in_step or not group.runs.end():
            continue
        if group.reshards_after_forward:
            group.unit.reshard()
