"""Ctrl-C while fsdp_c's own Python runs: the next step is right.

Python raises KeyboardInterrupt where a function of it begins or has called one in C.
All ranks are interrupted at the same place, as the one rank of a notebook is.
"""

import gc
import os
import random
import sys
from collections.abc import Callable
from types import FrameType, TracebackType

import pytest
import torch

import fsdp_c
from helpers.distributed import distributed
from helpers.models import BATCH, DIM, MLP, Block
from helpers.reference import Differential
from helpers.rows import APIS, in_either_api

_PACKAGE = os.path.dirname(fsdp_c.__file__)
_NUM_PLACES = 8


class _Interrupt:
    """Raises KeyboardInterrupt in the package, at the ``number``-th place; 0: never."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.num_places = 0

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "c_return"):
            return
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return
        self.num_places += 1
        if self.num_places == self._number:
            sys.setprofile(None)
            raise KeyboardInterrupt

    def __enter__(self) -> "_Interrupt":
        gc.disable()  # what it finalizes is another number of places on each rank
        sys.setprofile(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        sys.setprofile(None)
        gc.enable()
        return kind is KeyboardInterrupt


def _run_step(differential: Differential) -> None:
    x = torch.ones(BATCH, DIM, dtype=torch.float64)
    differential.model(x).sum().backward()


def _make(api: str, num_steps: int) -> Differential:
    differential = in_either_api(api, MLP, {Block})
    differential.train(num_steps)
    return differential


def _count(run: Callable[[], None]) -> int:
    with _Interrupt(0) as interrupt:
        run()
    return interrupt.num_places


# What is made in the first step is made for the engine, all of it or nothing.
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_a_step(api: str, num_steps: int, seed: int) -> None:
    _run_step(_make(api, num_steps))  # what is kept for the process is made
    differential = _make(api, num_steps)
    num_places = _count(lambda: _run_step(differential))
    places = range(1, num_places + 1)
    drawn = random.Random(seed).sample(places, min(num_places, _NUM_PLACES))
    num_ended = 0  # Python drops what is raised while it closes a generator
    for number in drawn:
        differential = _make(api, num_steps)
        with _Interrupt(number):
            _run_step(differential)
            num_ended += 1
        differential.optimizer.zero_grad()
        differential.train(2)
        differential.evaluate()
    assert num_ended < len(drawn)
