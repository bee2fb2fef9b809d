"""QLoRA: frozen weights in four bits, of torchao's NF4Tensor, beside trained adapters.

Compared with the same model that was never sharded, and the data of all ranks.
"""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

from fsdp_c import FSDP, CPUOffloadPolicy, checkpoint, fully_shard
from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import groups_destroyed
from helpers.seeds import generator

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")

DIM = 192  # rows for 1, 2 and 3 ranks, in whole blocks
BLOCK, SCALER_BLOCK = 64, 4
BATCH = 12


def _nf4() -> Any:
    from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

    return nf4_tensor


@contextlib.contextmanager
def _cleanly() -> Iterator[None]:
    """Destroy the groups made inside; gather an NF4Tensor's tensors one after another.

    torchao starts their gathers together. torch's gloo (2.11 to 2.14) notes without a
    lock what a group's call that ended last was, and the name of such a gather is too
    long to lie inside its string: of two that end at once both free the one before.
    """
    functional = torch.ops._c10d_functional
    gather = functional.all_gather_into_tensor.default
    table = _nf4().NF4_OPS_TABLE
    gather_inside = table[gather]

    def in_turn(op: Any, *arguments: Any) -> Any:
        def waited(*each: Any) -> Tensor:
            tensor: Tensor = functional.wait_tensor(op(*each))
            return tensor

        return gather_inside(waited, *arguments)

    with groups_destroyed(), mock.patch.dict(table, {gather: in_turn}):
        yield


class _Layer(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        quantized = _nf4().to_nf4(torch.randn(rows, rows) / 14, BLOCK, SCALER_BLOCK)
        self.weight = nn.Parameter(quantized, requires_grad=False)
        self.down = nn.Linear(rows, 4, bias=False)
        self.up = nn.Linear(4, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _nf4().linear_nf4(x, self.weight) + self.up(self.down(x))
        return torch.tanh(result)


def _build(seed: int = 0, rows: int = DIM) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(_Layer(rows) for _ in range(3)))


def _shard(ranks: list[int], seed: int = 0, **options: Any) -> Any:
    model, mesh = _build(seed), DeviceMesh(TEST_DEVICE, ranks)
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01
    )


def _step(
    model: nn.Module, optim: torch.optim.Optimizer, step: int, rank: int, size: int
) -> Tensor:
    x = torch.randn(BATCH, DIM, generator=generator(step, 0)).chunk(size)[rank]
    out: Tensor = model(x)
    (out - 1).square().mean().backward()
    optim.step()
    optim.zero_grad()
    return out.detach()


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.detach().full_tensor()
    return whole


def _assert_same_nf4(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    names, _ = expected.__tensor_flatten__()
    for name in names:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def _weights(model: nn.Module) -> list[Tensor]:
    return [layer.weight for layer in model.children()]  # type: ignore[misc]


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("offloads", [False, True])
@distributed(world_size=(1, 2, 3), timeout_s=120)
def test_training(rank: int, world_size: int, reshards: bool, offloads: bool) -> None:
    """Outputs and adapters are those without sharding; weights keep their bits."""
    options: dict[str, Any] = {"reshard_after_forward": reshards}
    if offloads:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    with _cleanly():
        reference, model = _build(), _shard(list(range(world_size)), **options)
        optims = _optimizer(reference), _optimizer(model)
        for layer in model:
            local = layer.weight.to_local()
            assert type(local).__name__ == "NF4Tensor"
            assert local.shape == (DIM // world_size, DIM)
        for step in range(3):
            expected = _step(reference, optims[0], step, 0, 1).chunk(world_size)[rank]
            found = _step(model, optims[1], step, rank, world_size)
            torch.testing.assert_close(found, expected)
        for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
            if its.requires_grad:
                torch.testing.assert_close(_whole(mine), its.detach())
            else:
                assert mine.grad is None
                _assert_same_nf4(_whole(mine), its)


@distributed(world_size=2, timeout_s=120)
def test_state_dicts(rank: int, tmp_path: Path) -> None:
    """Sharded ones with torch.distributed.checkpoint, and full ones."""
    with _cleanly():
        model, other = _shard([0, 1]), _shard([0, 1], seed=1)
        dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "c")
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=tmp_path / "c")
        set_model_state_dict(other, state)
        full = get_model_state_dict(
            other, options=StateDictOptions(full_state_dict=True)
        )
        reference = _build().state_dict()
        assert full.keys() == reference.keys()
        for name, value in reference.items():
            if name.endswith("weight") and value.shape == (DIM, DIM):
                _assert_same_nf4(full[name], value)
            else:
                assert torch.equal(full[name], value)


@distributed(world_size=3, timeout_s=120)
def test_checkpoint(rank: int, tmp_path: Path) -> None:
    """Weights load bit for bit on the ranks that saved them; others are refused."""
    with _cleanly():
        if rank < 2:
            mesh = DeviceMesh(TEST_DEVICE, [0, 1])
            group = mesh.get_group()
            model = _shard([0, 1])
            optim = _optimizer(model)
            _step(model, optim, 0, rank, 2)
            path = tmp_path / "c"
            checkpoint.save(path, model, optim, process_group=group)
            other = _shard([0, 1], seed=1)
            other_optim = _optimizer(other)
            checkpoint.load(path, other, other_optim, process_group=group)
            for mine, its in zip(_weights(other), _weights(_build()), strict=True):
                _assert_same_nf4(_whole(mine), its)
            with (
                mock.patch(f"{__name__}.BLOCK", 32),
                pytest.raises(
                    checkpoint.CheckpointError, match="quantize it in the same way"
                ),
            ):
                checkpoint.load(path, _shard([0, 1]), process_group=group)
            for step in (1, 2):
                expected = _step(model, optim, step, rank, 2)
                assert torch.equal(expected, _step(other, other_optim, step, rank, 2))
        else:
            for _ in range(4):
                DeviceMesh(TEST_DEVICE, [0, 1])
        dist.barrier()
        checkpoint.verify(tmp_path / "c")
        model = _shard([0, 1, 2])
        with pytest.raises(
            checkpoint.CheckpointError,
            match=r"0\.weight.*NF4Tensor, which cannot be cut",
        ):
            checkpoint.load(tmp_path / "c", model)


@distributed(world_size=3, timeout_s=120)
def test_refusals(rank: int) -> None:
    """What blocks do not allow, and the first API, before anything is changed."""
    with _cleanly():
        model = _build(rows=128)
        before = list(model.parameters())
        with pytest.raises(
            ValueError, match=r"'0\.weight'.*NF4Tensor.*3 ranks.*ignored"
        ):
            fully_shard(model, mesh=DeviceMesh(TEST_DEVICE, [0, 1, 2]))
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        with pytest.raises(ValueError, match=r"weight.*wraps other tensors"):
            FSDP(_build(), use_orig_params=True)
