"""Tensors that the user keeps while the engine frees, moves or reuses their memory.

Random walks over freezing, thawing, keeping, clearing, stepping and reading. What was
kept stays readable, and once it is nobody's gradient any more, its values stay. Run
under AddressSanitizer every night (`.ci/nightly asan`), where reading memory that is
gone ends the process.
"""

import gc
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_c import reset
from helpers.distributed import STRATEGIES, TEST_DEVICE, distributed
from helpers.impl import FSDP
from helpers.rows import shard_by

NUM_WALKS = int(os.environ.get("FSDP_C_WALKS", "4"))
NUM_ACTIONS = 60


class _Net(nn.Sequential):
    """Three units, of which one is large enough to be read in place."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(5, 40),
            nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)),
            nn.Linear(40, 3, bias=False),
        )


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Kept:
    """A tensor, and its values since it is no gradient any more."""

    def __init__(self, tensor: Tensor, param: nn.Parameter) -> None:
        self.tensor = tensor
        self.param = param
        self.values: Tensor | None = None

    def read(self) -> None:
        """Fail if the values have changed; reading itself may end the process."""
        now = _local(self.tensor).detach().clone()
        assert torch.isfinite(now).all()
        if self.values is not None:
            assert torch.equal(now, self.values), "a kept gradient changed"
        elif self.param.grad is None:
            self.values = now


class _Walk:
    """One walk over one model."""

    def __init__(self, make: Callable[[], Any], seed: int) -> None:
        self.rng = random.Random(seed)
        self.make = make
        self.kept: list[_Kept] = []
        self.begin()

    def begin(self) -> None:
        self.model = self.make()
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=0.01, momentum=0.9)

    def run(self) -> None:
        """Take all actions, then let the model go and read what was kept."""
        actions = (self.train, self.train, self.freeze, self.keep, self.clear)
        more = (self.step, self.evaluate, self.raise_in_forward, self.move, self.fresh)
        for _ in range(NUM_ACTIONS):
            self.rng.choice((*actions, *actions, *more))()
            for each in self.kept:
                each.read()
        del self.model, self.optimizer, self.params
        gc.collect()
        for each in self.kept:
            each.read()

    def loss(self) -> Tensor:
        return self.model(torch.ones(2, 5)).square().mean()

    def train(self) -> None:
        """Run a backward, with or without a reduction."""
        if not any(param.requires_grad for param in self.params):
            return
        mode = self.rng.choice(("sync", "sync", "none", "sharded"))
        if isinstance(self.model, FSDP):
            if mode == "sync":
                self.loss().backward()
                return
            with self.model.no_sync(**({"sharded": True} if mode == "sharded" else {})):
                self.loss().backward()
        else:
            self.model.set_requires_gradient_sync(mode != "none")
            self.loss().backward()
        # Thawing is refused while a gradient waits for its reduction.
        if self.rng.random() < 0.5:
            self.finish()

    def finish(self) -> None:
        """Reduce what waits."""
        if not isinstance(self.model, FSDP):
            self.model.set_requires_gradient_sync(True)
        if any(param.requires_grad for param in self.params):
            self.loss().backward()

    def freeze(self) -> None:
        """Freeze or thaw some; their gradients stay."""
        self.finish()
        for param in self.params:
            if self.rng.random() < 0.4:
                param.requires_grad_(not param.requires_grad)

    def keep(self) -> None:
        """Keep gradients, or parts of them."""
        for param in self.params:
            grad = param.grad
            if grad is None or self.rng.random() < 0.5:
                continue
            part = self.rng.choice(("all", "view", "detached"))
            if part == "view":
                grad = _local(grad).view(-1)[1:]
            elif part == "detached":
                grad = _local(grad).detach()
            self.kept.append(_Kept(grad, param))

    def clear(self) -> None:
        how = self.rng.choice(("none", "zeros", "some"))
        if how == "some":
            for param in self.params:
                if self.rng.random() < 0.5:
                    param.grad = None
        else:
            self.optimizer.zero_grad(set_to_none=how == "none")
        for each in self.kept:
            each.read()

    def step(self) -> None:
        self.finish()
        self.optimizer.step()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.loss()

    def raise_in_forward(self) -> None:
        """Leave a forward by an exception, and reset."""
        with pytest.raises(TypeError):
            self.model(torch.ones(2, 5), 1)
        if self.rng.random() < 0.3:
            reset(self.model)
            self.optimizer.zero_grad()

    def move(self) -> None:
        """Put memory elsewhere."""
        for param in self.params:
            if TEST_DEVICE == "cpu" and self.rng.random() < 0.2:
                _local(param).detach().share_memory_()

    def fresh(self) -> None:
        """Go on with another model; what was kept of this one stays."""
        if self.rng.random() < 0.2:
            self.begin()


@pytest.mark.parametrize("api", ["FSDP flat", "fully_shard"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(NUM_WALKS))
@distributed(world_size=(1, 2))
def test_walks(seed: int, strategy: str, api: str) -> None:
    units = {nn.Linear, nn.LayerNorm} if seed % 2 else {nn.Sequential}
    _Walk(lambda: shard_by(api, _Net(), units, strategy=strategy), seed).run()
