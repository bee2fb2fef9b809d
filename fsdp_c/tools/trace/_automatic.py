"""FSDP_C_TRACE=folder: steps of a script that cannot be changed are recorded.

The first model whose outermost module runs often enough is recorded: its third, fourth
and fifth forward, with what follows them, since the first steps learn the order of the
units and allocate. The rank's file is written when the sixth forward begins, or at the
program's end.
"""

import atexit
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fsdp_c._engines import engine
from fsdp_c._engines.models import root_engine
from fsdp_c._fully_shard.group import group_of
from fsdp_c.tools.trace._recording import Timeline, start

NUM_SKIPPED = 2
NUM_STEPS = 3


class _Watcher:
    """Counts the forwards of one root; records when it is time."""

    taken = False  # a model of this program was recorded, or is

    def __init__(self, root: nn.Module, folder: str) -> None:
        self.engine = root_engine(root)
        self.folder = folder
        self.num_forwards = 1  # the engine is made by the first
        self.timeline: Timeline | None = None
        self.leave: Callable[[], object]  # ends the calls before a forward
        group = group_of(root)
        if group is None:
            self.leave = root.register_forward_pre_hook(self.before_forward).remove
        else:  # hooks of such a module run when the step has begun
            group.before_run = self.before_forward
            self.leave = partial(setattr, group, "before_run", None)

    def before_forward(self, module: nn.Module, args: Any) -> None:
        if root_engine(module) is not self.engine:
            self.end()  # it is inside of another root now, which has a watcher
            return
        self.num_forwards += 1
        if self.num_forwards == NUM_SKIPPED + 1:
            self.begin(module)
        elif self.num_forwards == NUM_SKIPPED + NUM_STEPS + 1:
            self.end()

    def begin(self, module: nn.Module) -> None:
        if _Watcher.taken:
            self.leave()
            return
        _Watcher.taken = True
        try:
            self.timeline = start(module, NUM_STEPS, folder=self.folder)
        except (OSError, RuntimeError, ValueError) as error:
            warnings.warn(f"FSDP_C_TRACE: nothing is recorded: {error}", stacklevel=2)
            self.leave()
            return
        atexit.register(self.end)

    def end(self) -> None:
        self.leave()
        timeline, self.timeline = self.timeline, None
        if timeline is None:
            return
        atexit.unregister(self.end)
        try:
            timeline.stop()
        except (OSError, RuntimeError) as error:
            warnings.warn(f"FSDP_C_TRACE: nothing was written: {error}", stacklevel=2)
            return
        if timeline.recorded.rank == 0:
            print(
                f"fsdp_c: {NUM_STEPS} steps were recorded in {self.folder}; see "
                f"python -m fsdp_c trace summary {self.folder}",
                file=sys.stderr,
            )


def install(folder: str) -> None:
    """Record the first model of this program that runs often enough."""
    # The hook that a watcher registers on its module keeps it.
    engine.engine_listeners.append(lambda root: _Watcher(root, folder))
