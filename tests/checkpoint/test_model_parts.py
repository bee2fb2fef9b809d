"""Buffers, ignored modules, extra states, replicas, offload: who saves what."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_c import checkpoint
from helpers.distributed import distributed
from helpers.groups import hybrid_groups
from helpers.impl import CPUOffload, MixedPrecision, ShardingStrategy, fsdp
from helpers.models import MLP, Block
from helpers.reference import assert_same_tensors, full_state_dict


class Parts(nn.Module):
    """A block, a norm with buffers, a module to ignore, an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.BatchNorm1d(6)
        self.left = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("gone", torch.rand(2), persistent=False)
        self.register_buffer("table", torch.rand(3, 4).t())  # not contiguous
        self.counter = 0

    def get_extra_state(self) -> Any:
        return {"counter": self.counter, "table": torch.arange(3)}

    def set_extra_state(self, state: Any) -> None:
        assert state["table"].tolist() == [0, 1, 2]
        self.counter = state["counter"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.block(x))


_wrap = functools.partial(fsdp, units={Block}, use_orig_params=True)


def _parts(seed: int, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    module = Parts()
    nn.init.normal_(module.norm.running_mean)
    return _wrap(module, ignored_modules=[module.left], **kwargs)


@pytest.mark.parametrize(
    "precision",
    [None, MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)],
)
@distributed(world_size=2)
def test_buffers_ignored_and_extra_state(tmp_path: Path, precision: Any) -> None:
    model = _parts(0, mixed_precision=precision)
    model(torch.randn(4, 6))
    model.module.counter = 41
    expected = full_state_dict(model)
    checkpoint.save(tmp_path / "c", model)
    other = _parts(1, mixed_precision=precision)
    other(torch.randn(4, 6))
    checkpoint.load(tmp_path / "c", other)
    assert other.module.counter == 41
    found = full_state_dict(other)
    assert found.pop("_extra_state")["counter"] == 41
    expected.pop("_extra_state")
    assert_same_tensors("state", found, expected, 0.0)
    assert "gone" not in expected
    assert other.module.left.weight.is_contiguous(memory_format=torch.channels_last)
    if precision is not None:
        assert other.module.table.dtype == torch.bfloat16
        assert found["table"].dtype == torch.float32


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=4)
def test_replicas(
    rank: int, tmp_path: Path, shape: tuple[int, int], use_orig_params: bool
) -> None:
    """Of replicas one writes; all of them load."""
    with hybrid_groups(*shape) as groups:
        torch.manual_seed(0)
        model = _wrap(
            MLP(),
            process_group=groups,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=use_orig_params,
        )
        optim = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 6)).sum().backward()
        optim.step()
        expected = full_state_dict(model)
        checkpoint.save(tmp_path / "c", model, optim)
        checkpoint.verify(tmp_path / "c")
        torch.manual_seed(1)
        other = _wrap(MLP(), use_orig_params=not use_orig_params)
        other_optim = torch.optim.AdamW(other.parameters())
        checkpoint.load(tmp_path / "c", other, other_optim)
        assert_same_tensors("state", full_state_dict(other), expected, 0.0)
        checkpoint.save(tmp_path / "d", other, other_optim)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        checkpoint.load(tmp_path / "d", model, optim)
        assert_same_tensors("state", full_state_dict(model), expected, 0.0)
        size = (tmp_path / "c" / f"rank-{rank:05d}-of-00004.safetensors").stat().st_size
        numel = sum(tensor.numel() for tensor in expected.values())
        if rank >= shape[1]:
            assert size < 40_000  # only its random states
        elif shape[1] == 1:
            assert size > 3 * 4 * numel
        del model, optim, other, other_optim


@distributed(world_size=2)
def test_offload_and_dtype_of_masters(tmp_path: Path) -> None:
    model = _wrap(
        MLP(),
        cpu_offload=CPUOffload(offload_params=True),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    )
    model(torch.randn(4, 6)).sum().backward()
    expected = copy.deepcopy(full_state_dict(model))
    checkpoint.save(tmp_path / "c", model)
    found = checkpoint.info(tmp_path / "c").manifest
    assert {seg.dtype for unit in found.units for seg in unit.segments} == {"F32"}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    checkpoint.load(tmp_path / "c", model)
    assert_same_tensors("state", full_state_dict(model), expected, 0.0)


@distributed(world_size=2)
def test_memory_that_the_user_replaced(tmp_path: Path) -> None:
    """What param.data points at between steps is what is saved and loaded."""
    model = _wrap(MLP())
    with torch.no_grad():
        for param in model.parameters():
            param.data = torch.full_like(param, 3.0)
    checkpoint.save(tmp_path / "c", model)
    with torch.no_grad():
        for param in model.parameters():
            param.data = torch.zeros_like(param)
    checkpoint.load(tmp_path / "c", model)
    for name, tensor in full_state_dict(model).items():
        assert (tensor == 3.0).all(), name


@distributed(world_size=2)
def test_load_between_micro_batches(tmp_path: Path) -> None:
    """A unit that keeps its block inside no_sync() notices what was loaded."""
    torch.manual_seed(0)
    model = _wrap(MLP(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    torch.manual_seed(1)
    other = _wrap(MLP(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    checkpoint.save(tmp_path / "c", other)
    x = torch.randn(4, 6)
    expected = other(x)
    with model.no_sync():
        model(x).sum().backward()
        checkpoint.load(tmp_path / "c", model)
        found = model(x)
    assert torch.equal(found, expected)


@distributed(world_size=2)
def test_only_between_steps(tmp_path: Path) -> None:
    model = _wrap(MLP())
    with (
        model.summon_full_params(model),
        pytest.raises(checkpoint.CheckpointError, match="between steps"),
    ):
        checkpoint.save(tmp_path / "c", model)
    assert list(tmp_path.iterdir()) == []
    checkpoint.save(tmp_path / "c", model)
