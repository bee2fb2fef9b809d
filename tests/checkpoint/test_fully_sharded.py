"""Checkpoints of fully_shard(), at any world size and between the two APIs."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint, fully_shard
from fsdp_c.checkpoint._holders import checked_layout
from fsdp_c.checkpoint._manifest import (
    Manifest,
    ParamSpec,
    SegmentSpec,
    UnitSpec,
    parse_manifest,
)
from helpers.distributed import distributed
from helpers.groups import groups_destroyed
from helpers.models import VOCAB
from helpers.reference import assert_same_tensors
from helpers.rows import shard_units
from helpers.seeds import generator
from helpers.state_dicts import whole_state
from helpers.tensor_parallel import (
    ParallelBlock,
    ParallelModel,
    parallelize,
    two_meshes,
)

DIM = 6
SIZES = (1, 2, 3, 4, 7)
BATCH = 84  # over so many ranks


class _Block(nn.Module):
    """Uneven rows, a row for each of the first ranks only, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 7)
        self.down = nn.Linear(7, DIM, bias=False)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(inputs)) * self.scale[0] + self.scale[1]
        result: Tensor = inputs + self.down(hidden)
        return result


class _Model(nn.Module):
    """Two blocks, a frozen layer, and two parts with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.first.bias.requires_grad_(False)
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.last = nn.Linear(DIM, DIM, bias=False)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        result: Tensor = self.last(hidden)
        return result


class _Part(nn.Module):
    """A module with a group in it, and a part of another one."""

    def __init__(self, model: _Model) -> None:
        super().__init__()
        self.weight = model.first.weight
        self.block = model.blocks[0]


def _initial() -> _Model:
    torch.manual_seed(3)
    model = _Model()
    with torch.no_grad():
        for number, block in enumerate(model.blocks):
            block.count.fill_(number + 1)
    return model


def _by_columns(param: nn.Parameter) -> Any:
    return Shard(1) if param.shape == (7, DIM) else None


def _rows(model: nn.Module, mesh: DeviceMesh | None, **options: Any) -> Any:
    assert isinstance(model, _Model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _wrapped(model: nn.Module, mesh: DeviceMesh | None, **options: Any) -> Any:
    group = None if mesh is None else mesh.get_group()
    return FSDP(model, process_group=group, **options)


_BLOCKS = ModuleWrapPolicy({_Block})
DOORS: dict[str, Callable[[nn.Module, DeviceMesh | None], Any]] = {
    "rows": _rows,
    "columns": lambda model, mesh: _rows(model, mesh, shard_placement_fn=_by_columns),
    "originals": lambda model, mesh: _wrapped(
        model, mesh, use_orig_params=True, auto_wrap_policy=_BLOCKS
    ),
    "flat": lambda model, mesh: _wrapped(
        model, mesh, use_orig_params=False, auto_wrap_policy=_BLOCKS
    ),
    "originals of one unit": lambda model, mesh: _wrapped(
        model, mesh, use_orig_params=True
    ),
    "one flat": lambda model, mesh: _wrapped(model, mesh, use_orig_params=False),
}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=0.01
    )


def _train(
    model: Any, optim: torch.optim.Optimizer, steps: range, rank: int, size: int
) -> None:
    for step in steps:
        inputs = torch.randn(BATCH, DIM, generator=generator("rows", step))
        optim.zero_grad()
        model(inputs.chunk(size)[rank]).square().mean().backward()
        optim.step()


def _changed(model: nn.Module) -> nn.Module:
    """Return the model with other weights: what is not loaded is seen."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(5)
    return model


# What saves and what loads.
_COMMON = (
    ("originals", "one flat"),
    ("rows", "flat"),
    ("columns", "originals"),
    ("originals", "rows"),
    ("flat", "columns"),
)
_PAIRS = [
    *_COMMON,
    *(
        pytest.param(pair, marks=pytest.mark.only_full)
        for pair in (
            ("flat", "originals of one unit"),
            *itertools.product(("rows", "columns", "originals", "flat"), repeat=2),
        )
        if pair not in _COMMON
    ),
]


@pytest.mark.parametrize("pair", _PAIRS, ids="-".join)
@distributed(world_size=7, timeout_s=120.0, device="cpu")
def test_any_world_size_and_api(
    rank: int, tmp_path: Path, pair: tuple[str, str]
) -> None:
    """1, 2, 3, 4 and 7 ranks save after 2 steps; 1, 2, 3, 4 and 7 go on for 2."""
    saved_by, loaded_by = pair
    model: Any = _initial()
    optim = _optimizer(model)
    _train(model, optim, range(4), 0, 1)
    expected = model.state_dict()
    with groups_destroyed():
        # Names of their own: DTensor takes an equal mesh, whose groups are destroyed,
        # from a cache.
        name = f"{saved_by}_{loaded_by}"
        meshes = {
            size: DeviceMesh("cpu", list(range(size)), mesh_dim_names=(name,))
            for size in SIZES
        }
        for size in SIZES:
            path = tmp_path / f"from-{size}"
            if rank < size:
                model = DOORS[saved_by](_initial(), meshes[size])
                optim = _optimizer(model)
                _train(model, optim, range(2), rank, size)
                group = meshes[size].get_group()
                checkpoint.save(path, model, optim, process_group=group)
            dist.barrier()
            if rank == 0:
                checkpoint.verify(path)
            for other in SIZES:
                if rank < other:
                    model = DOORS[loaded_by](_changed(_initial()), meshes[other])
                    optim = _optimizer(model)
                    group = meshes[other].get_group()
                    found = checkpoint.load(path, model, optim, process_group=group)
                    assert found.random_states == (size == other)
                    _train(model, optim, range(2, 4), rank, other)
                    state = whole_state(model.state_dict())
                    assert_same_tensors(f"{size} -> {other}", state, expected)
                dist.barrier()
        del model, optim


@distributed(world_size=4, timeout_s=120.0, device="cpu")
def test_resume_is_bitwise_with_replicas(rank: int, tmp_path: Path) -> None:
    """Also while the save writes in a thread, and into a model that has trained."""
    with groups_destroyed():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        model = _rows(_initial(), mesh, shard_placement_fn=_by_columns)
        optim = _optimizer(model)
        _train(model, optim, range(2), rank, 4)
        handle = checkpoint.save(tmp_path / "at-2", model, optim, blocking=False)
        _train(model, optim, range(2, 4), rank, 4)
        handle.result()
        expected, state = whole_state(model.state_dict()), _states(optim)
        loaded = checkpoint.load(tmp_path / "at-2", model, optim)
        assert loaded.missing == loaded.unexpected == ()
        _train(model, optim, range(2, 4), rank, 4)
        for name, value in whole_state(model.state_dict()).items():
            assert torch.equal(value, expected[name]), name
        for name, value in _states(optim).items():
            assert torch.equal(value, state[name]), name
        del model, optim


def _states(optim: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": (
            value.to_local() if isinstance(value, DTensor) else value
        ).clone()
        for index, state in optim.state_dict()["state"].items()
        for name, value in state.items()
    }


@distributed(world_size=4, timeout_s=120.0, device="cpu")
def test_tensor_parallel(tmp_path: Path) -> None:
    """From (dp, tp) of (2, 2) to (4,) and to (1, 4), with parts of different sizes."""

    def train(model: Any, optim: torch.optim.Optimizer, steps: range, dp: Any) -> None:
        batches = [torch.arange(12).view(4, 3) % VOCAB + step for step in steps]
        for batch in batches:
            optim.zero_grad()
            own = batch % VOCAB
            if dp is not None:
                own = own.chunk(dp.size())[dp.get_local_rank()]
            model(own).square().mean().backward()
            optim.step()

    def build(num_dp: int, num_tp: int) -> tuple[Any, torch.optim.Optimizer, Any]:
        torch.manual_seed(5)
        model: Any = ParallelModel(hidden=7)
        dp = None
        if num_tp > 1:
            dp, tp = two_meshes(num_dp, num_tp)
            model = shard_units(parallelize(model, tp), {ParallelBlock}, mesh=dp)
        elif num_dp > 1:
            names = (f"only_{tmp_path.name}",)
            dp = init_device_mesh("cpu", (num_dp,), mesh_dim_names=names)
            model = shard_units(model, {ParallelBlock}, mesh=dp)
        return model, _optimizer(model), dp

    reference, optim, _ = build(1, 1)
    train(reference, optim, range(4), None)
    with groups_destroyed():
        model, optim, dp = build(2, 2)
        train(model, optim, range(2), dp)
        checkpoint.save(tmp_path / "of-2x2", model, optim)
        for num_dp, num_tp in ((4, 1), (1, 4), (2, 2)):
            model, optim, dp = build(num_dp, num_tp)
            checkpoint.load(tmp_path / "of-2x2", _changed(model), optim)
            if (num_dp, num_tp) == (4, 1):  # nothing to convert
                checkpoint.save(tmp_path / "of-4", model, optim)
            train(model, optim, range(2, 4), dp)
            checkpoint.save(tmp_path / "end", model, optim)
            other: Any = fully_shard(ParallelModel(hidden=7))
            checkpoint.load(tmp_path / "end", other)
            state = whole_state(other.state_dict())
            assert_same_tensors("state", state, reference.state_dict())
        model, optim, dp = build(2, 2)
        checkpoint.load(tmp_path / "of-4", _changed(model), optim)
        train(model, optim, range(2, 4), dp)
        checkpoint.save(tmp_path / "end", model, optim)
        checkpoint.load(tmp_path / "end", other)
        state = whole_state(other.state_dict())
        assert_same_tensors("state", state, reference.state_dict())
        del model, optim, other


@distributed(world_size=3, device="cpu")
def test_every_rank_has_a_state(rank: int, tmp_path: Path) -> None:
    """Also where it has no row: saving through DTensor is a collective."""
    model = _rows(_initial(), None)
    optim = _optimizer(model)
    _train(model, optim, range(1), rank, 3)
    checkpoint.save(tmp_path / "at-1", model, optim)
    other = _rows(_initial(), None)
    other_optim = _optimizer(other)
    checkpoint.load(tmp_path / "at-1", other, other_optim)
    expected, actual = _states(optim), _states(other_optim)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
    for state in other_optim.state.values():
        assert isinstance(state["exp_avg"], DTensor)


@distributed(world_size=2, device="cpu")
def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = _rows(_Model(), None)
    with pytest.raises(checkpoint.CheckpointError, match="still on meta device"):
        checkpoint.save(tmp_path / "none", model)
    model = _rows(_initial(), None)
    problem = "'weight' is a DTensor of a group that is not in this _Part"
    with pytest.raises(checkpoint.CheckpointError, match=problem):
        checkpoint.save(tmp_path / "none", _Part(model))
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    problem = r"the optimizer steps parameter 0 of shape \(2,\), which is not in"
    with pytest.raises(checkpoint.CheckpointError, match=problem):
        checkpoint.save(tmp_path / "none", model, stranger)
    handle = model.blocks[1].register_forward_hook(
        lambda *_: checkpoint.save(tmp_path / "none", model)
    )
    problem = "unit 'FSDP_Model' is inside forward or backward"
    with pytest.raises(checkpoint.CheckpointError, match=problem):
        model(torch.zeros(1, DIM))
    handle.remove()
    model.reset_iter_state()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("numel", [7, 8])
@distributed(world_size=2, device="cpu")
def test_models_of_both_apis_are_saved_apart(tmp_path: Path, numel: int) -> None:
    """Side by side they are no model, whether the ranks' rows are equal or not."""
    rows = fully_shard(nn.Linear(3, numel))
    both = nn.ModuleDict({"flat": FSDP(nn.Linear(3, numel)), "rows": rows})
    optim = torch.optim.SGD(both.parameters(), lr=0.1)
    for call in (
        lambda: checkpoint.save(tmp_path / "c", both),
        lambda: FSDP.optim_state_dict(both, optim),
    ):
        with pytest.raises(
            Exception, match=r"'rows\.weight' is sharded by fully_shard"
        ):
            call()
    for name, model in both.items():
        checkpoint.save(tmp_path / name, model)
        checkpoint.load(tmp_path / name, model)


def _unit(**changes: Any) -> UnitSpec:
    """Return the description of one parameter of 3 rows over 2 ranks."""
    param = ParamSpec("w", (), (3, 4), "F32", True, 0, 0)
    segment = SegmentSpec("F32", True, 8)
    fields = {"segments": (segment,), "params": (param,), "by_rows": True, **changes}
    return UnitSpec("", (0, 1), (1, False, False), **fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"by_rows": False},  # as one flat parameter it has shards of 6
        {"segments": (SegmentSpec("F32", True, 6),)},
        {"params": (ParamSpec("w", (), (3, 4), "F32", True, 0, 1),)},
        {"params": (ParamSpec("w", (), (), "F32", True, 0, 0),)},
    ],
)
def test_contradicting_manifest(changes: dict[str, Any]) -> None:
    checked_layout(_unit())
    with pytest.raises(ValueError, match="the manifest contradicts itself"):
        checked_layout(_unit(**changes))


def test_versions_of_the_manifest() -> None:
    """An older fsdp_c reads what has no rows, and refuses the rest by its version."""
    for by_rows, version in ((True, 2), (False, 1)):
        manifest = Manifest("0" * 32, 2, (_unit(by_rows=by_rows),), ())
        data = manifest.dump()
        assert f'"version": {version},'.encode() in data
        assert parse_manifest(data) == manifest


@distributed(world_size=2, device="cpu")
def test_export_and_import(rank: int, tmp_path: Path) -> None:
    """The command line's tools read it without a model."""
    from safetensors.torch import load_file

    model = _rows(_initial(), None, shard_placement_fn=_by_columns)
    optim = _optimizer(model)
    _train(model, optim, range(2), rank, 2)
    checkpoint.save(tmp_path / "of-2", model, optim, random_states=False)
    weights = whole_state(model.state_dict())
    if rank == 0:
        checkpoint.verify(tmp_path / "of-2")
        checkpoint.export(tmp_path / "of-2", tmp_path / "exported")
        exported = load_file(tmp_path / "exported" / "model.safetensors")
        for name, value in exported.items():
            assert torch.equal(value, weights[name]), name
    dist.barrier()
    checkpoint.import_safetensors(tmp_path / "exported", _changed(model))
    for name, value in whole_state(model.state_dict()).items():
        assert torch.equal(value, weights[name]), name
    expected = _states(optim)
    checkpoint.load(tmp_path / "of-2", _changed(model), optim)
    for name, value in whole_state(model.state_dict()).items():
        assert torch.equal(value, weights[name]), name
    assert all(torch.equal(v, expected[n]) for n, v in _states(optim).items())
