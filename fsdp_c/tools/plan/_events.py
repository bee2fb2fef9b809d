"""Turns a trace of modules into the events of units; see csrc/core/plan/step_plan.h."""

from collections.abc import Sequence

from fsdp_c import _native
from fsdp_c.tools.plan._trace import Entry, StepTrace
from fsdp_c.tools.plan._units import PlannedUnit

_Event = tuple[int, int, int, int, int, float, int, int, bool]
_BOUNDARIES = {"enter": _native.PLAN_ENTER, "leave": _native.PLAN_LEAVE}


class StepEvents:
    """The events of a step.

    Attributes:
        forward, backward: As ``_native.plan_step`` reads them.
        trained: Names of parameters that get gradients.
    """

    def __init__(
        self,
        units: Sequence[PlannedUnit],
        trace: StepTrace,
        *,
        flops_per_second: float,
        offload_min_bytes: int,
    ) -> None:
        """Make them, of ``units``, the root first, and a trace of the same model.

        Storages of ``offload_min_bytes`` or more may be offloaded.
        """
        self._units = {u.name: i for i, u in enumerate(units) if u.main is None}
        # Units apart run with their main ones.
        self._apart: dict[int, list[int]] = {}
        for i, unit in enumerate(units):
            if unit.main is not None:
                self._apart.setdefault(self._units[unit.main], []).append(i)
        self._params = {
            param.name: (i, j)
            for i, unit in enumerate(units)
            for j, param in enumerate(unit.params)
        }
        entered = {self._units.get(e.name) for e in trace.forward if e.kind == "enter"}
        self._runs = [
            (i if unit.main is None else self._units[unit.main]) in entered
            for i, unit in enumerate(units)
        ]
        self._rate = flops_per_second
        # Bytes of each forward entry that may wait in host memory.
        self._offloaded = [
            sum(each for each in entry.saved if each >= offload_min_bytes)
            for entry in trace.forward
        ]
        self._savers: dict[int, int] = {}  # by forward entry: its event
        self.trained: set[str] = set()
        self.forward: list[_Event] = []
        self.backward: list[_Event] = []
        for index, entry in enumerate(trace.forward):
            if entry.kind == "work":
                self._savers[index] = len(self.forward)
                self.forward.append(self._work(entry, index))
            else:
                self.forward += self._boundary(entry, is_last="leave")
        for entry in trace.backward:
            if entry.kind == "work":
                self.backward.append(self._work(entry, entry.reads))
            elif entry.kind == "use":
                self.backward.append(self._use(entry))
            else:
                self.backward += self._boundary(entry, is_last="enter")

    def _work(self, entry: Entry, saved_by: int | None) -> _Event:
        offloaded, event = 0, 0
        if saved_by is not None:
            offloaded, event = self._offloaded[saved_by], self._savers[saved_by]
        work = (_native.PLAN_WORK, 0, 0, *entry.change, entry.flops / self._rate)
        return (*work, offloaded, event, False)

    def _use(self, entry: Entry) -> _Event:
        unit, param = self._params.get(entry.name, (-1, 0))
        if unit < 0 or not self._runs[unit]:  # ignored, or not used
            return self._work(entry, None)
        self.trained.add(entry.name)
        return (_native.PLAN_USE, unit, param, *entry.change, 0.0, 0, 0, False)

    def _boundary(self, entry: Entry, *, is_last: str) -> list[_Event]:
        unit = self._units.get(entry.name)
        if unit is None:
            return []
        kind = _BOUNDARIES[entry.kind]
        both = [unit, *reversed(self._apart.get(unit, []))]
        if entry.kind == is_last:
            both.reverse()
        return [(kind, each, 0, 0, 0, 0.0, 0, 0, entry.requires_grad) for each in both]


def recomputed_units(units: Sequence[PlannedUnit]) -> tuple[str, ...]:
    """Return the units that recompute: all but the root and those inside others."""
    names = [unit.name for unit in units if unit.main is None and unit.name]
    return tuple(
        name
        for name in names
        if not any(name.startswith(f"{other}.") for other in names)
    )
