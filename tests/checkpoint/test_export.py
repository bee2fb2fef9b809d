"""Export to Hugging Face's files and back, other numbers of ranks, the commands."""

import contextlib
import copy
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from fsdp_c import checkpoint
from helpers.commands import exit_status
from helpers.distributed import distributed
from helpers.impl import fsdp
from helpers.models import CASES, MLP
from helpers.reference import assert_same_tensors, full_state_dict

pytestmark = pytest.mark.bookkeeping


def _wrap(module: nn.Module, case: str = "mlp") -> Any:
    return fsdp(module, units=CASES[case].unit_classes, use_orig_params=True)


def _load_set(folder: Path) -> dict[str, torch.Tensor]:
    """Read a set as Hugging Face does, with the library."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    content = json.loads(index.read_text())
    files = {n: load_file(folder / n) for n in set(content["weight_map"].values())}
    tensors = {name: files[file][name] for name, file in content["weight_map"].items()}
    assert sum(map(len, files.values())) == len(tensors)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    assert content["metadata"]["total_size"] == total
    return tensors


@pytest.mark.parametrize("case", ["mlp", "transformer", "scalar", "mixed_dtype"])
@pytest.mark.parametrize("limit", ["5GB", 100])
@distributed(world_size=2)
def test_round_trip(rank: int, tmp_path: Path, case: str, limit: int | str) -> None:
    model = _wrap(CASES[case].build(), case)
    expected = copy.deepcopy(full_state_dict(model))
    checkpoint.save(tmp_path / "c", model)
    if rank == 0:
        names = checkpoint.export(tmp_path / "c", tmp_path / "hf", max_shard_size=limit)
        assert sorted(names) == sorted(os.listdir(tmp_path / "hf"))
        assert (len(names) > 1) == (limit == 100)
        found = _load_set(tmp_path / "hf")
        tied = expected.keys() - found.keys()
        assert tied == ({"head.weight"} if case == "transformer" else set())
        for name in tied:
            found[name] = expected[name]
        assert_same_tensors("export", found, expected, 0.0)
        for name in names:
            if limit == 100 and not name.endswith("json"):
                tensors = load_file(tmp_path / "hf" / name).values()
                nbytes = sum(t.numel() * t.element_size() for t in tensors)
                assert nbytes <= 100 or len(tensors) == 1
    dist.barrier()
    torch.manual_seed(4)
    other = fsdp(CASES[case].build())
    checkpoint.import_safetensors(tmp_path / "hf", other)
    assert_same_tensors("import", full_state_dict(other), expected, 0.0)


@distributed(world_size=2)
def test_import_of_others_files(rank: int, tmp_path: Path) -> None:
    """What the library wrote; other dtypes with cast; everything wrong at once."""
    reference = MLP()
    state = {k: v.to(torch.bfloat16) for k, v in reference.state_dict().items()}
    if rank == 0:
        save_file(state, tmp_path / "low.safetensors")
        wrong = {k: v for k, v in state.items() if k != "inp.weight"}
        wrong["out.weight"] = torch.zeros(3, 7)
        wrong["surplus"] = torch.zeros(1)
        save_file(wrong, tmp_path / "wrong.safetensors")
    dist.barrier()
    torch.manual_seed(1)
    model = _wrap(MLP())
    before = copy.deepcopy(full_state_dict(model))
    with pytest.raises(checkpoint.CheckpointError, match=r"inp\.bias' is BF16.*cast"):
        checkpoint.import_safetensors(tmp_path / "low.safetensors", model)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.import_safetensors(tmp_path / "wrong.safetensors", model, cast=True)
    text = "\n".join(caught.value.problems)
    assert "'inp.weight' is missing" in text
    assert "'surplus' is unexpected" in text
    assert "[3, 7]" in text
    assert_same_tensors("state", full_state_dict(model), before, 0.0)
    checkpoint.import_safetensors(tmp_path / "low.safetensors", model, cast=True)
    expected = {k: v.float() for k, v in state.items()}
    assert_same_tensors("state", full_state_dict(model), expected, 0.0)


@distributed(world_size=2)
def test_bad_sets(rank: int, tmp_path: Path) -> None:
    model = _wrap(MLP())
    state = {k: v.clone() for k, v in full_state_dict(model).items()}
    names = list(state)
    (tmp_path / "outside").mkdir(exist_ok=True)

    def write(weight_map: dict[str, str] | None) -> Path:
        folder = tmp_path / "set"
        folder.mkdir(exist_ok=True)
        if rank == 0:
            save_file(state, folder / "a.safetensors")
            save_file(state, tmp_path / "outside" / "a.safetensors")
            if weight_map is not None:
                text = json.dumps({"metadata": {}, "weight_map": weight_map})
                (folder / "model.safetensors.index.json").write_text(text)
        dist.barrier()
        return folder

    for weight_map, message in (
        (None, "neither"),
        (
            dict.fromkeys(names, "../outside/a.safetensors"),
            "which is not a safetensors file in",
        ),
        (dict.fromkeys(names, "/etc/passwd"), "which is not a safetensors file in"),
        (dict.fromkeys(names, "b.safetensors"), "cannot be read"),
        (dict.fromkeys([*names, "more"], "a.safetensors"), "has no 'more'"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=message):
            checkpoint.import_safetensors(write(weight_map), model)
        dist.barrier()
    checkpoint.import_safetensors(write(dict.fromkeys(names, "a.safetensors")), model)


@distributed(world_size=1)
def test_export_options(tmp_path: Path) -> None:
    model = _wrap(MLP())
    expected = full_state_dict(model)
    checkpoint.save(tmp_path / "c", model)
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    assert len(checkpoint.export(tmp_path / "c", hf, max_shard_size="300B")) > 3
    with pytest.raises(FileExistsError, match="overwrite=True"):
        checkpoint.export(tmp_path / "c", hf)
    checkpoint.export(tmp_path / "c", hf, overwrite=True, dtype=torch.bfloat16)
    assert sorted(os.listdir(hf)) == ["config.json", "model.safetensors"]
    found = _load_set(hf)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.cpu().to(torch.bfloat16)), name
    for size in ("5XB", "", -1, 0, 1.5, "0GB"):
        with pytest.raises(ValueError, match="max_shard_size"):
            checkpoint.export(tmp_path / "c", hf, max_shard_size=size)  # type: ignore[arg-type]


@distributed(world_size=2)
def test_progress_is_shown_on_rank_0(rank: int, tmp_path: Path) -> None:
    """Bars on stderr if asked for; nothing where it is no terminal."""
    model = _wrap(MLP())

    def shown(call: Any) -> str:
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            call()
        return text.getvalue()

    def save(**kwargs: Any) -> str:
        return shown(lambda: checkpoint.save(tmp_path / "c", model, **kwargs))

    def load(**kwargs: Any) -> str:
        return shown(lambda: checkpoint.load(tmp_path / "c", model, **kwargs))

    assert save() == load() == ""
    bars = save(progress=True) + load(progress=True)
    for label in ("saving", "checking", "loading"):
        assert (label in bars) == (rank == 0), bars
    assert ("100%" in bars) == (rank == 0)
    if rank == 0:
        assert "verifying" in shown(
            lambda: checkpoint.verify(tmp_path / "c", progress=True)
        )


@distributed(world_size=1)
def test_commands(tmp_path: Path) -> None:
    model = _wrap(MLP())
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).sum().backward()
    optim.step()
    checkpoint.save(tmp_path / "c", model, optim)
    path = str(tmp_path / "c")

    def run(*words: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = exit_status("checkpoint", *words)
        return status, out.getvalue(), err.getvalue()

    status, out, err = run("info", path)
    assert (status, err) == (0, "")
    assert re.search(r"^ranks +1$", out, re.MULTILINE)
    assert re.search(r"^blocks\.2 +1 +4 +136 +F32$", out, re.MULTILINE), out
    assert "AdamW, 1 groups, state of 16 parameters" in out
    status, out, err = run("verify", path)
    assert (status, err) == (0, "")
    assert "intact" in out
    status, out, err = run("export", path, f"{path}-hf", "--dtype", "bfloat16")
    assert (status, out, err) == (0, "model.safetensors\n", "")
    assert run("export", path, f"{path}-hf")[0] == 1
    assert run("export", path, f"{path}-hf", "--overwrite")[0] == 0
    data = tmp_path / "c" / "rank-00000-of-00001.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    status, out, err = run("verify", path)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert "truncated" in err
    assert run("verify", f"{path}-none")[0] == 1
    assert run("what", path)[0] == 2
    assert run()[0] == 2
    assert run("--help")[0] == 0
