"""Counts the calls that Python makes, or measures the time, for models of two sizes.

    python -m helpers.scale calls|seconds <kind>:<small>:<large> ...

In a process of its own, as rank 0 of 4 in a group that only pretends (torch's "fake"
backend). Prints, by kind and phase, the number of calls of both sizes, or the
processor's time. Calls do not see loops in C: tests/c counts those that could grow;
the time sees them.
"""

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from helpers.fake_ranks import fake_ranks

# nn.Module.load_state_dict picks the keys of each child by comparing all keys of its
# parent: for a list of n modules n * n comparisons, with or without fsdp_c.
TORCHS_OWN = {"startswith"}
WIDTH = 4


class _Calls:
    def __init__(self) -> None:
        self.num = 0

    def note(self, _frame: Any, event: str, argument: Any) -> None:
        is_own = event == "c_call" and argument.__name__ not in TORCHS_OWN
        self.num += event == "call" or is_own


def _count(body: Callable[[], Any]) -> tuple[Any, int]:
    calls = _Calls()
    sys.setprofile(calls.note)
    try:
        result = body()
    finally:
        sys.setprofile(None)
    return result, calls.num


def _measure(body: Callable[[], Any]) -> tuple[Any, float]:
    gc.collect()
    begin = time.process_time()
    result = body()
    return result, time.process_time() - begin


MEASURES: dict[str, Callable[[Callable[[], Any]], tuple[Any, float]]] = {
    "calls": _count,
    "seconds": _measure,
}


def _model(kind: str, size: int) -> tuple[Any, dict[str, Any]]:
    """Return a model and arguments of FSDP."""
    import torch
    from torch import Tensor, nn
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    class Units(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.units = nn.ModuleList(Unit() for _ in range(size))

        def forward(self, x: Tensor) -> Tensor:
            for unit in self.units:
                x = unit(x)
            return x

    class Params(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.params = nn.ParameterList(torch.ones(WIDTH) for _ in range(size))

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.stack(list(self.params)).sum(0)

    if kind == "params":
        return Params(), {}
    model = Units()
    kwargs: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({Unit})}
    if kind == "shared":  # a parameter that every unit uses
        for unit in model.units:
            unit.shared = model.units[0].weight
    if kind == "ignored":  # one parameter of each unit
        for unit in model.units:
            unit.ignored = nn.Parameter(torch.ones(WIDTH))
        kwargs["ignored_states"] = [unit.ignored for unit in model.units]
    return model, kwargs


def _phases(measure: str, kind: str, size: int) -> dict[str, float]:
    import torch

    from fsdp_c import FSDP

    model, kwargs = _model(kind, size)
    sums: dict[str, float] = {}

    def phase(name: str, body: Callable[[], Any]) -> Any:
        result, sums[name] = MEASURES[measure](body)
        return result

    def summon() -> None:
        with FSDP.summon_full_params(wrapped):
            pass

    wrapped = phase("construction", lambda: FSDP(model, use_orig_params=True, **kwargs))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for step in ("first", "second"):
        loss = phase(f"{step} forward", lambda: wrapped(torch.ones(2, WIDTH)).sum())
        phase(f"{step} backward", loss.backward)
        phase(f"{step} clip_grad_norm_", lambda: wrapped.clip_grad_norm_(1.0))
        phase(f"{step} optimizer step", optimizer.step)
    phase("summon_full_params", summon)
    state = phase("state_dict", wrapped.state_dict)
    phase("load_state_dict", lambda: wrapped.load_state_dict(state))
    phase("optim_state_dict", lambda: FSDP.optim_state_dict(wrapped, optimizer))
    return sums


def main() -> None:
    """Measure both sizes."""
    warnings.simplefilter("ignore")  # of parameters that units share
    measure, *models = sys.argv[1:]
    sums = {}
    with fake_ranks(4):
        for model in models:
            kind, small, large = model.split(":")
            _phases(measure, kind, 2)  # what is made once
            both = [_phases(measure, kind, int(size)) for size in (small, large)]
            sums[kind] = {name: [each[name] for each in both] for name in both[0]}
    print(json.dumps(sums))


if __name__ == "__main__":
    main()
