"""Shards that wait in host memory between phases of training, as verl moves them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import _runtime_utils

import fsdp_c.integrations
from fakecuda.device import needs_cuda
from helpers.distributed import distributed
from helpers.impl import FSDP, fsdp

pytestmark = needs_cuda

DIM = 48
CPU = torch.device("cpu")


class Pair:
    """A sharded model of two units and a frozen layer, and the unsharded model."""

    def __init__(self, rank: int, world_size: int, *, use_orig_params: bool) -> None:
        torch.manual_seed(1)
        layers = (nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        self.reference = nn.Sequential(*layers, nn.Linear(DIM, DIM)).double()
        self.reference[3].requires_grad_(False)
        model = copy.deepcopy(self.reference)
        model[0] = fsdp(model[0], use_orig_params=use_orig_params)
        self.model: Any = fsdp(model, use_orig_params=use_orig_params)
        self._optimizers = [
            torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
            for each in (self.model, self.reference)
        ]
        self._mine = slice(4 * rank, 4 * rank + 4)
        self._num_rows = 4 * world_size

    def train(self) -> None:
        x = torch.randn(self._num_rows, DIM, dtype=torch.float64)
        self.model(x[self._mine]).square().mean().backward()
        self.reference(x).square().mean().backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        with FSDP.summon_full_params(self.model):
            theirs = self.reference.parameters()
            for found, expected in zip(self.model.parameters(), theirs, strict=True):
                torch.testing.assert_close(found, expected)

    def move(self, device: torch.device) -> None:
        """As ``offload_fsdp_model_to_cpu`` and ``load_fsdp_model_to_gpu`` of verl."""
        _runtime_utils._lazy_init(self.model, self.model)
        assert self.model._is_root
        for handle in self.model._all_handles:
            assert not handle._offload_params
            flat_param = handle.flat_param
            assert flat_param.data_ptr() == flat_param._local_shard.data_ptr()
            handle.flat_param_to(device, non_blocking=True)
            flat_param._local_shard = flat_param.data
            assert flat_param._local_shard.device.type == device.type


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cuda")
def test_there_and_back(rank: int, world_size: int, use_orig_params: bool) -> None:
    """Memory goes, gradients' too; training and the optimizer go on."""
    pair = Pair(rank, world_size, use_orig_params=use_orig_params)
    device = pair.model.compute_device
    fsdp_c.integrations.install()
    try:
        pair.train()
        before = {id(param) for param in pair.model.parameters()}
        for _ in range(3):
            full = torch.cuda.memory_allocated()
            shards = sum(p.numel() * 8 for p in pair.model.parameters())
            pair.move(CPU)
            params = list(pair.model.parameters())
            assert {id(param) for param in params} == before
            assert all(param.device == CPU for param in params)
            assert torch.cuda.memory_allocated() <= full - shards
            pair.move(device)
            assert all(param.device == device for param in params)
            pair.check()
            pair.train()
        pair.check()
    finally:
        fsdp_c.integrations.uninstall()


@distributed(world_size=2, device="cuda")
def test_what_cannot_be(rank: int, world_size: int) -> None:
    pair = Pair(rank, world_size, use_orig_params=True)
    device = pair.model.compute_device
    pair.train()
    handle = pair.model._all_handles[0]
    with pytest.raises(ValueError, match=r"cannot become torch.float32"):
        handle.flat_param_to(torch.float32)
    with pytest.raises(AttributeError, match=r"_local_shard of a flat parameter"):
        handle.flat_param._local_shard = torch.zeros(3)
    handles = pair.model._all_handles
    for handle in handles:
        handle.flat_param_to(CPU)
    with pytest.raises((ValueError, RuntimeError), match=r"moved away.*move it back"):
        pair.model(torch.zeros(4, DIM, dtype=torch.float64))
    fsdp_c.reset(pair.model)
    for handle in handles:
        handle.flat_param_to(device)
    with (
        FSDP.summon_full_params(pair.model),
        pytest.raises(RuntimeError, match="summon_full_params"),
    ):
        handle.flat_param_to(CPU)
    pair.check()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cuda")
def test_whole_parameters_move(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    """In a summon ``to()`` shows them elsewhere; what is written there is kept."""
    pair = Pair(rank, world_size, use_orig_params=use_orig_params)
    device = pair.model.compute_device
    pair.train()
    with FSDP.summon_full_params(pair.model, writeback=False):
        pair.model.module.to(CPU)
        assert all(value.device == CPU for value in pair.model.state_dict().values())
        pair.model.module.to(device)
    pair.check()
    with FSDP.summon_full_params(pair.model, writeback=True), torch.no_grad():
        pair.model.module.to(CPU)
        double(pair.model.parameters())
    double(pair.reference.parameters())
    pair.check()
    pair.train()
    pair.check()


def double(params: Any) -> None:
    with torch.no_grad():
        for param in params:
            assert isinstance(param, Tensor)
            param.mul_(2)
