"""torch.autocast, which keeps what it cast of a parameter until its context ends.

It knows parameters by their tensors; see drop_casts() in csrc/torch/unit_forward.cpp.
"""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from helpers.distributed import TEST_DEVICE, distributed
from helpers.models import DIM, MLP, Block, Chain
from helpers.rows import APIS, shard_by


def _autocast(*, cache_enabled: bool = True) -> Any:
    return torch.autocast(TEST_DEVICE, torch.bfloat16, cache_enabled=cache_enabled)


def _losses(model: nn.Module, batch: Tensor, *, cache_enabled: bool) -> list[float]:
    """Return the losses of steps that are all in one context."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    with _autocast(cache_enabled=cache_enabled):
        for _ in range(4):
            loss = model(batch).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("api", APIS)
@distributed(world_size=(1, 2))
def test_steps_within_one_context(api: str, strategy: str) -> None:
    """A forward computes with what the step before wrote, not with older casts."""
    torch.manual_seed(0)
    module = MLP().to(TEST_DEVICE)
    batch = torch.randn(4, DIM, device=TEST_DEVICE)
    expected = _losses(copy.deepcopy(module), batch, cache_enabled=False)
    model = shard_by(api, module, {Block}, strategy=strategy)
    losses = _losses(model, batch, cache_enabled=True)
    assert expected[-1] < 0.9 * expected[0]
    torch.testing.assert_close(losses, expected, rtol=0.02, atol=0)


class _Casts(TorchDispatchMode):
    """Notes what is cast from fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dim() == 2:
            self.made.append(weakref.ref(result))
        return result

    @property
    def living_nbytes(self) -> int:
        found = [each for ref in self.made if (each := ref()) is not None]
        return sum(each.nbytes for each in found)


class _Checkpointed(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_casts_go_with_their_unit(api: str, trains: bool) -> None:
    """Or the whole model is there in bf16, evaluated or with checkpointing."""
    model = shard_by(
        api, _Checkpointed(Block() for _ in range(6)).to(TEST_DEVICE), {Block}
    )
    batch = torch.randn(3, DIM, device=TEST_DEVICE)
    one_block = sum(p.numel() * 2 for p in Block().parameters())
    with _Casts() as casts, _autocast(), torch.set_grad_enabled(trains):
        output = model(batch)
        assert len(casts.made) >= 2 * 6
        assert casts.living_nbytes < one_block
        if trains:
            output.float().sum().backward()
            assert casts.living_nbytes < one_block
