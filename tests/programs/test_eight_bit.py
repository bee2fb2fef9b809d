"""torchao's low-bit optimizers: training, and what two ranks save on other numbers.

Compared with the same optimizer over the model that was never sharded, and the data of
all ranks. Its state is quantized in blocks of a few hundred elements, each with a scale
of its own, and plain where a rank's part has no whole number of blocks: as the rows of
the first two of three ranks.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FSDP, checkpoint, fully_shard
from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import groups_destroyed
from helpers.seeds import generator

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")

DIM = 128
BATCH = 12  # over 1, 2 and 3 ranks
LR = 0.01

# What FullyShardedDataParallel shards: original or flat parameters; or fully_shard.
DOORS = ("originals", "flat", "rows")
_DOORS = [pytest.param("flat", marks=pytest.mark.only_full), "originals", "rows"]
OPTIMIZERS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def _build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(DIM, DIM, bias=False) for _ in range(2)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), nn.Linear(DIM, 3))


def _shard(door: str, optimizer: str, size: int = 2) -> tuple[Any, Any, Any]:
    """Return model, optimizer and group of the first ranks; None on the others."""
    mesh = DeviceMesh(TEST_DEVICE, list(range(size)))
    if dist.get_rank() >= size:
        return None, None, None
    model: Any = _build()
    if door == "rows":
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = FSDP(
            model,
            process_group=mesh.get_group(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=door == "originals",
        )
    return model, _optimizer(optimizer, model), mesh.get_group()


def _optimizer(name: str, model: nn.Module) -> Any:
    import torchao.optim

    return getattr(torchao.optim, name)(model.parameters(), lr=LR)


def _step(model: nn.Module, optim: Any, step: int, rank: int, size: int) -> Tensor:
    """Train on this rank's part of the step's data; return the outputs."""
    x = torch.randn(BATCH, DIM, generator=generator(step, 0)).chunk(size)[rank]
    out: Tensor = model(x)
    out.square().mean().backward()
    optim.step()
    optim.zero_grad()
    return out.detach()


def _classes(optim: Any) -> set[str]:
    states = [value for state in optim.state.values() for value in state.values()]
    return {type(getattr(value, "_local_tensor", value)).__name__ for value in states}


def _values(model: nn.Module, optim: Any) -> dict[str, Tensor]:
    """Return the whole states with their values."""
    options = StateDictOptions(full_state_dict=True)
    _, found = get_state_dict(model, optim, options=options)
    return {
        f"{name}.{key}": value.float()
        for name, state in found["state"].items()
        for key, value in state.items()
        if value.dim() > 0
    }


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Within what rounding to eight bits again may change."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        limit = 0.02 * value.abs().max().item()
        torch.testing.assert_close(found[name], value, rtol=0.1, atol=limit)


def _interpreted() -> Any:
    """Return a context in which torchao does not compile its step, which takes long."""
    return torch.compiler.set_stance("force_eager")


class _Expected:
    """Training without sharding: outputs of each step, and the weights after it."""

    def __init__(self, name: str) -> None:
        model = _build()
        optim = _optimizer(name, model)
        self.outputs: list[Tensor] = []
        self.weights: list[list[Tensor]] = []
        for step in range(4):
            self.outputs.append(_step(model, optim, step, 0, 1))
            self.weights.append([p.detach().clone() for p in model.parameters()])

    def check(self, step: int, out: Tensor, rank: int, size: int) -> None:
        """Compare outputs, which move by less than a step if the state is right."""
        mine = self.outputs[step].chunk(size)[rank]
        moved = (self.outputs[step] - self.outputs[step - 1]).abs().max().item()
        torch.testing.assert_close(out, mine, rtol=0, atol=min(0.03, 0.1 * moved))


def _save_or_load_with_torch(
    model: nn.Module, optim: Any, folder: Path, group: Any, *, load: bool
) -> None:
    model_state, optim_state = get_state_dict(model, optim)
    state = {"model": model_state, "optim": optim_state}
    if load:
        dcp.load(state, checkpoint_id=folder, process_group=group)
        set_state_dict(
            model, optim, model_state_dict=model_state, optim_state_dict=optim_state
        )
    else:
        dcp.save(state, checkpoint_id=folder, process_group=group)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("to", DOORS)
@distributed(world_size=3, timeout_s=240)
def test_checkpoint(
    rank: int, tmp_path: Path, door: str, to: str, optimizer: str
) -> None:
    """Two ranks save; they, one and three resume, also with the other API."""
    with groups_destroyed(), _interpreted():
        expected = _Expected(optimizer)
        saved: list[Any] = [None]
        model, optim, group = _shard(door, optimizer)
        if rank < 2:
            for step in range(2):
                out = _step(model, optim, step, rank, 2)
            expected.check(1, out, rank, 2)
            assert any(name.startswith("OptimState") for name in _classes(optim))
            saved = [_values(model, optim)]
            checkpoint.save(tmp_path / "c", model, optim, process_group=group)
            before = _classes(optim)
        dist.broadcast_object_list(saved)
        checkpoint.verify(tmp_path / "c")
        for size in (2, 1, 3):
            model, optim, group = _shard(to, optimizer, size)
            if rank >= size:
                continue
            checkpoint.load(tmp_path / "c", model, optim, process_group=group)
            if (size, to) == (2, door):
                assert _classes(optim) == before
            if "flat" not in (door, to) and (door, to) != ("rows", "originals"):
                for name, value in _values(model, optim).items():
                    assert torch.equal(value, saved[0][name]), name
            _assert_close(_values(model, optim), saved[0])
            for step in (2, 3):
                out = _step(model, optim, step, rank, size)
                expected.check(step, out, rank, size)


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "AdamW4bit"])
@pytest.mark.parametrize("door", ["originals", "rows"])
@distributed(world_size=2, timeout_s=120)
def test_resumes_bit_for_bit(
    rank: int, tmp_path: Path, door: str, optimizer: str
) -> None:
    """On the same ranks, with fsdp_c.checkpoint."""
    with groups_destroyed(), _interpreted():
        model, optim, _ = _shard(door, optimizer)
        for step in range(2):
            _step(model, optim, step, rank, 2)
        checkpoint.save(tmp_path / "c", model, optim, blocking=False).result()
        if rank == 0:
            checkpoint.export(tmp_path / "c", tmp_path / "model")
        other, other_optim, _ = _shard(door, optimizer)
        checkpoint.load(tmp_path / "c", other, other_optim)
        for step in (2, 3):
            first = _step(model, optim, step, rank, 2)
            assert torch.equal(first, _step(other, other_optim, step, rank, 2))


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "AdamW4bit"])
@pytest.mark.parametrize("door", _DOORS)
@distributed(world_size=3, timeout_s=240)
def test_torch_checkpoint(rank: int, tmp_path: Path, door: str, optimizer: str) -> None:
    """torch.distributed.checkpoint: the class stays, on other numbers of ranks too.

    Three ranks cannot cut fully_shard's quantized rows there, as with torch's own.
    """
    with groups_destroyed(), _interpreted():
        expected = _Expected(optimizer)
        model, optim, group = _shard(door, optimizer)
        if rank < 2:
            for step in range(2):
                _step(model, optim, step, rank, 2)
            folder = tmp_path / "c"
            _save_or_load_with_torch(model, optim, folder, group, load=False)
        dist.barrier()
        for size in (2, 1) if door == "rows" else (2, 1, 3):
            model, optim, group = _shard(door, optimizer, size)
            if rank >= size:
                continue
            _save_or_load_with_torch(model, optim, tmp_path / "c", group, load=True)
            if size < 3:
                assert any(name.startswith("OptimState") for name in _classes(optim))
            for step in (2, 3):
                out = _step(model, optim, step, rank, size)
                expected.check(step, out, rank, size)


@pytest.mark.parametrize("door", _DOORS)
@distributed(world_size=2, timeout_s=120)
def test_full_state_dict(rank: int, door: str) -> None:
    """Values come out, and go into a fresh optimizer in its own class."""
    with groups_destroyed(), _interpreted():
        model, optim, _ = _shard(door, "AdamW8bit")
        for step in range(2):
            _step(model, optim, step, rank, 2)
        options = StateDictOptions(full_state_dict=True)
        model_state, optim_state = get_state_dict(model, optim, options=options)
        for state in optim_state["state"].values():
            assert {type(value) for value in state.values()} == {Tensor}
        values, before = _values(model, optim), _classes(optim)
        other, other_optim, _ = _shard(door, "AdamW8bit")
        set_state_dict(
            other,
            other_optim,
            model_state_dict=model_state,
            optim_state_dict=optim_state,
            options=options,
        )
        assert _classes(other_optim) == before
        _assert_close(_values(other, other_optim), values)
        _step(other, other_optim, 2, rank, 2)
        if door == "rows":
            return
        # FSDP's own methods say the class to an optimizer that has no state yet.
        found = FSDP.optim_state_dict(model, optim)
        other_optim = _optimizer("AdamW8bit", other)
        loaded = FSDP.optim_state_dict_to_load(other, other_optim, found)
        other_optim.load_state_dict(loaded)
        assert _classes(other_optim) == _classes(optim)
        _step(other, other_optim, 2, rank, 2)
