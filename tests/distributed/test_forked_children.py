"""Children made by fork: none sees a shard's later values without a word."""

import os
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from helpers.distributed import distributed
from helpers.models import DIM
from helpers.reference import sgd
from helpers.rows import APIS, shard_by
from helpers.transports import OWN, over

pytestmark = [
    pytest.mark.cpu_only("an accelerator's shards are not in host memory"),
    pytest.mark.skipif(
        torch.__version__.startswith("2.11"),
        reason="torch 2.11 cannot refuse to read memory",
    ),
]
WIDTH = 64
REFUSAL = (
    "FSDP unit '0': this process was forked, and its shards are memory of its parent"
)


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


def _model(api: str, width: int = WIDTH) -> Any:
    torch.manual_seed(0)
    return shard_by(api, nn.Sequential(_Layer(width), _Layer(width)), {_Layer})


def _step(model: Any, optimizer: torch.optim.Optimizer, width: int = WIDTH) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, width)).square().sum().backward()
    optimizer.step()


def _shards(model: nn.Module) -> list[Tensor]:
    return [
        (param.to_local() if isinstance(param, DTensor) else param).detach()
        for param in model.parameters()
    ]


class _Child:
    """A fork that runs ``function`` when it is told to."""

    def __init__(self, function: Callable[[], Any]) -> None:
        begin, self._begin = os.pipe()
        self._answer, answer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.read(begin, 1)
            try:
                data = function()
            except Exception as error:
                data = str(error)
            os.write(answer, pickle.dumps(data))
            os._exit(0)
        os.close(begin)
        os.close(answer)

    def run(self) -> Any:
        """Return what the function returns, or its error as text."""
        os.write(self._begin, b"x")
        with open(self._answer, "rb") as answer:
            result = pickle.loads(answer.read())
        os.close(self._begin)
        os.waitpid(self._pid, 0)
        return result


def _sums(shards: list[Tensor]) -> list[float]:
    return [float(shard.double().sum()) for shard in shards]


@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_a_shard_that_the_parent_changes_is_refused(api: str) -> None:
    """Not its copies, and nothing in the parent."""
    model = _model(api)
    optimizer = sgd(model.parameters())
    _step(model, optimizer)
    shards = _shards(model)
    copies = [shard.clone() for shard in shards]
    reads = _Child(lambda: _sums(shards))
    finds = _Child(lambda: _sums(_shards(model)))
    writes = _Child(lambda: [shard.zero_() for shard in shards])
    copied = _Child(lambda: _sums(copies))
    expected = _sums(copies)
    _step(model, optimizer)
    for child in (reads, finds, writes):
        answer = child.run()
        assert isinstance(answer, str), answer
        assert answer.startswith(REFUSAL), answer
        assert "FSDP_C_TRANSPORT=copy" in answer
    assert copied.run() == expected
    now = _sums(_shards(model))
    assert now != expected
    _step(model, optimizer)
    assert _sums(_shards(model)) != now


@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_private_shards_are_a_snapshot(api: str) -> None:
    """By a switch, before anybody has mapped them, and in units below 4 KiB."""
    for switch, width, num_steps in (
        ("copy", WIDTH, 1),
        ("c10d", WIDTH, 1),
        (OWN, WIDTH, 0),
        (OWN, DIM, 1),
    ):
        with over(switch):
            model = _model(api, width)
            optimizer = sgd(model.parameters())
            for _ in range(num_steps):
                _step(model, optimizer, width)
            expected = _sums(_shards(model))
            child = _Child(lambda model=model: _sums(_shards(model)))
            for _ in range(2):
                _step(model, optimizer, width)
            assert child.run() == expected
            assert _sums(_shards(model)) != expected


@distributed(world_size=2)
def test_shards_are_refused_when_their_model_is_gone() -> None:
    """The memory is what it was: the other ranks have it, too."""
    model = _model("FSDP")
    _step(model, sgd(model.parameters()))
    shards = _shards(model)
    del model
    child = _Child(lambda: _sums(shards))
    assert child.run().startswith(REFUSAL)


class _Ones(Dataset[Tensor]):
    """Holds the model, and reads none of it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(WIDTH)


@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_workers_of_a_data_loader_notice_nothing(api: str) -> None:
    model = _model(api)
    optimizer = sgd(model.parameters())
    _step(model, optimizer)
    loader = DataLoader(
        _Ones(model), batch_size=2, num_workers=1, multiprocessing_context="fork"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # the loader's; it ends by itself
            thread.join()
