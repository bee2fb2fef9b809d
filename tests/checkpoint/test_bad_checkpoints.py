"""The strict loader: everything wrong in one error, on all ranks, nothing changed."""

import copy
import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_c import checkpoint
from fsdp_c.checkpoint import _documents
from helpers.distributed import distributed
from helpers.impl import fsdp
from helpers.models import MLP, Block
from helpers.reference import assert_same_tensors, full_state_dict, objects_of_all_ranks

pytestmark = pytest.mark.bookkeeping


_wrap = functools.partial(fsdp, units={Block}, use_orig_params=True)


def _trained(module: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    model = _wrap(module)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 6)).sum().backward()
    optim.step()
    optim.zero_grad()
    return model, optim


def _refused(
    path: Path, model: Any, optim: Any = None, *, strict: bool = True
) -> tuple[str, ...]:
    """Return the problems of a load that must change nothing."""
    before = copy.deepcopy(full_state_dict(model))
    states = copy.deepcopy(optim.state_dict()) if optim is not None else {}
    random = torch.get_rng_state()
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load(path, model, optim, strict=strict)
    assert_same_tensors("state", full_state_dict(model), before, 0.0)
    if optim is not None:
        after = optim.state_dict()
        assert after["param_groups"] == states["param_groups"]
        for key, state in states["state"].items():
            for name, value in state.items():
                assert torch.equal(after["state"][key][name], value), (key, name)
    assert torch.equal(torch.get_rng_state(), random)
    problems = objects_of_all_ranks(caught.value.problems)
    assert all(each == problems[0] for each in problems), problems
    return caught.value.problems


class Other(MLP):
    """Differs from MLP in every way that a checkpoint may differ."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.out = nn.Linear(6, 4)  # another shape
        self.inp = nn.Linear(6, 6, dtype=torch.float64)  # another dtype
        self.more = nn.Linear(2, 2)  # missing in the checkpoint


@distributed(world_size=(2, 3))
def test_all_differences_in_one_error(tmp_path: Path) -> None:
    saved, saved_optim = _trained(MLP(num_blocks=3))
    checkpoint.save(tmp_path / "c", saved, saved_optim)
    model = _wrap(Other())
    optim = torch.optim.AdamW(model.parameters())
    text = "\n".join(_refused(tmp_path / "c", model, optim))
    assert "'more.weight' is missing" in text
    assert "'blocks.2.fc1.weight' is unexpected" in text
    assert "'optimizer: more.bias' is missing" in text
    assert "'out.weight' has shape [3, 6] in the checkpoint and [4, 6]" in text
    assert "'inp.bias' is F32 in the checkpoint and F64 in the model" in text
    loose = "\n".join(_refused(tmp_path / "c", model, optim, strict=False))
    assert "missing" not in loose
    assert "unexpected" not in loose
    assert "'out.weight' has shape" in loose


@distributed(world_size=2)
def test_not_strict(tmp_path: Path) -> None:
    saved, saved_optim = _trained(MLP(num_blocks=1))
    checkpoint.save(tmp_path / "c", saved, saved_optim)
    expected = full_state_dict(saved)
    torch.manual_seed(8)
    model, optim = _trained(MLP(num_blocks=2))
    before = copy.deepcopy(full_state_dict(model))
    kept = {
        name: value.clone()
        for name, value in optim.state[model.blocks[1].fc1.weight].items()
    }
    found = checkpoint.load(tmp_path / "c", model, optim, strict=False)
    assert len(found.missing) == 8
    assert found.unexpected == ()
    for name, tensor in full_state_dict(model).items():
        source = expected if name in expected else before
        assert torch.equal(tensor, source[name]), name
    for name, value in optim.state[model.blocks[1].fc1.weight].items():
        assert torch.equal(value, kept[name]), name
    found = checkpoint.load(tmp_path / "c", _wrap(MLP(num_blocks=1)), strict=False)
    assert found.missing == found.unexpected == ()


@distributed(world_size=2)
def test_another_optimizer(tmp_path: Path) -> None:
    """Refused; not strictly, too, where it could not go on with the state."""
    model, _ = _trained(MLP())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 6)).sum().backward()
    sgd.step()
    checkpoint.save(tmp_path / "sgd", model, sgd)
    other, adamw = _trained(MLP())
    assert any(
        "was a SGD and is a AdamW now" in problem
        for problem in _refused(tmp_path / "sgd", other, adamw)
    )
    (problem,) = _refused(tmp_path / "sgd", other, adamw, strict=False)
    assert "AdamW does not take the state that SGD saved (KeyError('step'))" in problem


@distributed(world_size=2)
def test_the_folder_is_closed(tmp_path: Path) -> None:
    """Also if the optimizer does not fit the model."""
    model, optim = _trained(MLP())
    checkpoint.save(tmp_path / "c", model, optim)
    stranger = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    (problem,) = _refused(tmp_path / "c", model, stranger)
    assert "which is not in the model" in problem
    opened = {each.resolve() for each in Path("/proc/self/fd").iterdir()}
    assert (tmp_path / "c").resolve() not in opened


@distributed(world_size=2)
def test_what_was_not_saved(tmp_path: Path) -> None:
    model, optim = _trained(MLP())
    checkpoint.save(tmp_path / "c", model, random_states=False)
    (problem,) = _refused(tmp_path / "c", model, optim)
    assert "no optimizer state" in problem
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 2)
    with pytest.raises(checkpoint.CheckpointError, match="no scheduler"):
        checkpoint.load(tmp_path / "c", model, scheduler=scheduler)
    assert checkpoint.load(tmp_path / "c", model).random_states is False
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint"):
        checkpoint.load(tmp_path / "other", model)
    (tmp_path / "empty").mkdir(exist_ok=True)
    with pytest.raises(checkpoint.CheckpointError, match="its save did not finish"):
        checkpoint.load(tmp_path / "empty", model)


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)


def _flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _change_entry(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"rank": 0', b'"rank": 1'))


def _resign(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = _documents.parse(path.read_bytes())
    change(value)
    path.write_bytes(_documents.dump(value))


def _move_first_piece(value: dict[str, Any]) -> None:
    piece = next(iter(value["pieces"].values()))
    piece["begin"] += 1
    piece["end"] += 1


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "truncated": ("rank-00000-of-00002.safetensors", _cut, r"is truncated: it has \d+"),
    "flipped": ("rank-00000-of-00002.safetensors", _flip_last, "is corrupted between"),
    "no file": ("rank-00001-of-00002.safetensors", os.unlink, "No such file"),
    "no entry": ("rank-00001-of-00002.json", os.unlink, "No such file"),
    "no manifest": ("manifest.json", os.unlink, "has no manifest.json"),
    "entry changed": ("rank-00000-of-00002.json", _change_entry, "checksum"),
    "manifest cut": ("manifest.json", _cut, "changed or cut off"),
    "other save": (
        "rank-00001-of-00002.json",
        lambda path: _resign(path, lambda v: v.update(save_id="0" * 32)),
        "belongs to another save",
    ),
    "piece gone": (
        "rank-00000-of-00002.json",
        lambda path: _resign(path, lambda v: v["pieces"].popitem()),
        "its entry has no|which the manifest lists",
    ),
    "piece moved": (
        "rank-00000-of-00002.json",
        lambda path: _resign(path, _move_first_piece),
        r"no F32 elements \[0, \d+\) of parameter .*, which the manifest lists",
    ),
    "layout changed": (
        "manifest.json",
        lambda path: _resign(
            path, lambda v: v["units"][0]["params"][1].update(offset=0)
        ),
        "contradicts itself",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
@distributed(world_size=2)
def test_damage(rank: int, tmp_path: Path, damage: str) -> None:
    """Every rank learns of a damage that one of them meets, and which it is."""
    model, optim = _trained(MLP())
    checkpoint.save(tmp_path / "c", model, optim)
    name, change, message = DAMAGES[damage]
    if rank == 0:
        change(tmp_path / "c" / name)
    dist.barrier()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    problems = _refused(tmp_path / "c", model, optim)
    assert any(re.search(message, problem) for problem in problems), problems
    with pytest.raises(checkpoint.CheckpointError, match=r"."):
        checkpoint.verify(tmp_path / "c")


@distributed(world_size=2)
def test_several_damages(rank: int, tmp_path: Path) -> None:
    """Both files, and a name: one error."""
    model, optim = _trained(MLP())
    checkpoint.save(tmp_path / "c", model, optim)
    if rank == 0:
        _cut(tmp_path / "c" / "rank-00000-of-00002.safetensors")
        _flip_last(tmp_path / "c" / "rank-00001-of-00002.safetensors")
    dist.barrier()
    other, other_optim = _trained(MLP(num_blocks=4))
    text = "\n".join(_refused(tmp_path / "c", other, other_optim))
    assert "rank-00000-of-00002.safetensors is truncated" in text
    assert "rank-00001-of-00002.safetensors is corrupted" in text
    assert "'blocks.3.fc1.bias' is missing" in text


@distributed(world_size=2)
def test_tied_here_and_not_there(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    apart = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    one, two = _wrap(tied), _wrap(apart)
    checkpoint.save(tmp_path / "tied", one)
    checkpoint.save(tmp_path / "apart", two)
    checkpoint.load(tmp_path / "tied", two)
    state = full_state_dict(two)
    assert torch.equal(state["0.weight"], full_state_dict(one)["0.weight"])
    assert torch.equal(state["0.weight"], state["1.weight"])
    (problem,) = _refused(tmp_path / "apart", one)
    assert "is one tensor in the model" in problem


@distributed(world_size=2)
def test_what_cannot_be_saved(rank: int, tmp_path: Path) -> None:
    """Said on all ranks, and what is at the path stays."""
    model = _wrap(MLP())
    checkpoint.save(tmp_path / "c", model)
    before = (tmp_path / "c" / "manifest.json").read_bytes()
    loop: list[Any] = []
    loop.append(loop)
    for extra, message in (
        ({"a": [object()]}, r"extra\['a'\]\[0\] is a object, which"),
        (frozenset({1}), "extra is a frozenset"),
        (loop, "contains itself"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=message):
            checkpoint.save(tmp_path / "c", model, extra=extra)
    with pytest.raises(checkpoint.CheckpointError, match=r"rank_extra.*\(rank 1\)"):
        checkpoint.save(
            tmp_path / "c", model, rank_extra=object() if rank == 1 else None
        )
    with pytest.raises(checkpoint.CheckpointError, match="overwrite=True"):
        checkpoint.save(tmp_path / "c", model, overwrite=False)
    (tmp_path / "mine").mkdir(exist_ok=True)
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(checkpoint.CheckpointError, match=r"'notes\.txt', which is not"):
        checkpoint.save(tmp_path / "mine", model)
    (tmp_path / "file").write_text("keep")
    with pytest.raises(checkpoint.CheckpointError, match="is not a folder"):
        checkpoint.save(tmp_path / "file", model)
    assert (tmp_path / "c" / "manifest.json").read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c", "file", "mine"]
    checkpoint.verify(tmp_path / "c")


@distributed(world_size=2)
def test_a_rank_that_cannot_write(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's disk is full: all fail, the old checkpoint stays, nothing is left."""
    model = _wrap(MLP())
    checkpoint.save(tmp_path / "c", model)
    before = (tmp_path / "c" / "manifest.json").read_bytes()

    def no_space(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    if rank == 1:
        monkeypatch.setattr(os, "writev", no_space)
    for blocking in (True, False):
        with pytest.raises(checkpoint.CheckpointError, match=r"No space left|rank 0"):
            checkpoint.save(tmp_path / "c", model, blocking=blocking).result()
        dist.barrier()
        assert (tmp_path / "c" / "manifest.json").read_bytes() == before
        assert [each.name for each in tmp_path.iterdir()] == ["c"]


@distributed(world_size=2)
def test_units_that_differ_by_rank(rank: int, tmp_path: Path) -> None:
    model = _wrap(MLP())
    if rank == 1:
        model.module.blocks[0].module.fc1.weight.requires_grad_(False)
    other = fsdp(MLP(), use_orig_params=True) if rank == 1 else model
    with pytest.raises(checkpoint.CheckpointError, match="other units than rank 0"):
        checkpoint.save(tmp_path / "c", other)
    assert json.dumps(sorted(os.listdir(tmp_path))) == "[]"
