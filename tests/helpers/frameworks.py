"""What the tests of frameworks share: a model, data and ranks."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_c
from helpers.models import DIM, MLP
from helpers.seeds import generator


class _Empty(ModuleType):
    """A module that has every name, and nothing behind it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def _replaced(names: Sequence[str]) -> Iterator[None]:
    """Have empty modules in the place of those that are not imported yet."""
    empty = {name: _Empty(name) for name in names if name not in sys.modules}
    sys.modules.update(empty)
    for name, module in empty.items():
        parent, _, child = name.rpartition(".")
        if parent in empty:
            setattr(empty[parent], child, module)
    try:
        yield
    finally:
        for name in empty:
            del sys.modules[name]


def framework(name: str, *unused: str) -> Any:
    """Import a framework's module; skip the test where it is not installed.

    Nothing that uses transformers is called here, and its import takes half a minute:
    it is left out, and so are the modules ``unused``.
    """
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    with _replaced(["transformers", *unused]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


LR = 1e-2
STEPS = 2


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MLP()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, DIM, generator=generator(100 * step + rank))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)


class Unsharded:
    """The reference: the model on all ranks' batches, with clipping."""

    def __init__(self, world_size: int, seed: int = 0) -> None:
        self.model = build(seed)
        self.optim = optimizer(self.model)
        self.world_size = world_size

    def train(self, steps: range, max_norm: float | None = None) -> None:
        for step in steps:
            for rank in range(self.world_size):
                loss = self.model(batch(step, rank)).square().mean()
                (loss / self.world_size).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            self.optim.step()
            self.optim.zero_grad()


@contextmanager
def installed() -> Iterator[None]:
    """Have fsdp_c in the place of torch's FSDP; say nothing of the frameworks' news."""
    fsdp_c.install()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        fsdp_c.uninstall()


def environment(rank: int, world_size: int) -> Any:
    """Return Lightning's view of processes that somebody else has started."""
    environments = framework("lightning.fabric.plugins.environments")

    class Ready(environments.LightningEnvironment):
        creates_processes_externally = True

        def __init__(self) -> None:
            super().__init__()
            self._global_rank, self._world_size = rank, world_size

        def local_rank(self) -> int:
            return rank

        def teardown(self) -> None:
            """Leave the processes alone."""

    return Ready()
