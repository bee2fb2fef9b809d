"""Hostile files: refused in words, or loaded exactly; nothing else ever happens.

``FSDP_C_TEST_NUM_FUZZ`` sets the number of cases (150, and 400 with ``--full``),
``FSDP_C_TEST_SEED`` shifts their seed. A failure names the case.
"""

import contextlib
import copy
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_c import checkpoint
from fsdp_c.checkpoint import _documents, _files
from fsdp_c.checkpoint._checksums import BlockSums
from helpers.distributed import distributed
from helpers.impl import fsdp
from helpers.models import MLP, Block
from helpers.reference import assert_same_tensors, full_state_dict
from helpers.seeds import seed_of

pytestmark = pytest.mark.bookkeeping

NUM_RANKS = 3
numbers_of_cases = pytest.mark.parametrize(
    "num_cases",
    [
        int(os.environ.get("FSDP_C_TEST_NUM_FUZZ", "150")),
        pytest.param(400, marks=pytest.mark.only_full),
    ],
)
# What only our own mistakes raise.
INTERNAL = re.compile(
    r"\b(KeyError|TypeError|AttributeError|IndexError|AssertionError|RecursionError|"
    r"ZeroDivisionError|UnboundLocalError|MemoryError|RuntimeError|SystemError)\b"
)
HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    7,
    2**31,
    2**56,
    2**63 - 1,
    2**64,
    10**300,
    1.5,
    -1e308,
    "",
    "F32",
    "F64",
    "../../secret",
    "/etc/passwd",
    "rank-00000-of-00003",
    "a" * 5000,
    "\u0000",
    "\ud800",
    [],
    {},
    [[]],
    {"": {}},
    {"$tensor": "plain/0"},
    {"$tensor": "../secret"},
    {"$tuple": [1]},
    {"$scalar": ["F32", 1.0]},
    {"$scalar": ["F32", 1e300]},
    {"$dict": [[{"$dict": []}, 1]]},
]


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a JSON value as (container, key)."""
    items: Any = ()
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, item in items:
        yield value, key
        yield from _nodes(item)


def _mutate_json(value: dict[str, Any], numbers: random.Random) -> None:
    """Change one place, now and then a few."""
    for _ in range(numbers.choice((1, 1, 1, 3))):
        nodes = list(_nodes(value))
        if not nodes:
            return
        where, key = numbers.choice(nodes)
        kind = numbers.randrange(7)
        if kind <= 2:
            where[key] = copy.deepcopy(numbers.choice(HOSTILE))
        elif kind == 3:
            del where[key]
        elif kind == 4:
            other, other_key = numbers.choice(nodes)
            with contextlib.suppress(KeyError, IndexError):
                where[key] = copy.deepcopy(other[other_key])
        elif kind == 5 and isinstance(where[key], int):
            where[key] += numbers.choice((-1, 1, 64, -64, 2**32))
        elif isinstance(where, dict):
            where[numbers.choice(("x", "../x", "begin", "$tuple"))] = where.pop(key)
        else:
            where.insert(key, where[key])


def _mutate_bytes(data: bytes, numbers: random.Random) -> bytes:
    changed = bytearray(data)
    place = numbers.randrange(len(changed) + 1)
    kind = numbers.randrange(6)
    if kind == 0:
        del changed[place:]
    elif kind == 1:
        del changed[place : place + numbers.choice((1, 2, 8, 1000))]
    elif kind == 2:
        changed[place:place] = numbers.randbytes(numbers.choice((1, 2, 8, 1000)))
    elif kind == 3:
        end = min(len(changed), place + numbers.choice((1, 8, 4096)))
        changed[place:end] = bytes(end - place)
    else:
        for _ in range(numbers.choice((1, 1, 5))):
            place = numbers.randrange(len(changed))
            changed[place] ^= 1 << numbers.randrange(8)
    return bytes(changed)


def _signed_text(data: bytes, numbers: random.Random) -> bytes:
    """Change the text of a document and give it a checksum that fits."""
    tail = data[data.index(b"\n") + 1 :]  # without the checksum
    kind = numbers.randrange(5)
    number = re.compile(rb"(?<=: )\d+")
    if kind == 0:
        depth = numbers.choice((50, 900, 1100, 100_000))
        tail = number.sub(b"[" * depth + b"]" * depth, tail, count=1)
    elif kind == 1:
        word = numbers.choice((b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"-0"))
        places = list(number.finditer(tail))
        place = numbers.choice(places)
        tail = tail[: place.start()] + word + tail[place.end() :]
    elif kind == 2:
        line = numbers.choice(tail.split(b"\n")[:-2])
        tail = tail.replace(line, line.rstrip(b",") + b",\n" + line, 1)
    else:
        tail = _mutate_bytes(tail, numbers)
    return _documents.sign(tail)


def _mutate_header(folder: Path, rank: int, numbers: random.Random) -> None:
    """Change the header of a rank's file; its entry knows the new checksums."""
    name = f"rank-{rank:05d}-of-{NUM_RANKS:05d}"
    path = folder / f"{name}.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if numbers.random() < 0.8:
        _mutate_json(header, numbers)
    text = json.dumps(header).encode()
    if numbers.random() < 0.5:
        text = text.ljust(length)
    length = len(text)
    if numbers.random() < 0.2:
        length = numbers.choice((0, 1, length + 1, 2**40, 2**63, 2**64 - 1))
    data = length.to_bytes(8, "little") + text + data[8 + len(text) :]
    path.write_bytes(data)
    entry = _documents.parse((folder / f"{name}.json").read_bytes())
    sums = BlockSums()
    sums.update(memoryview(data))
    entry["nbytes"] = len(data)
    entry["checksums"] = "".join(f"{value:08x}" for value in sums.finish())
    (folder / f"{name}.json").write_bytes(_documents.dump(entry))


def _mutate(folder: Path, numbers: random.Random) -> str:
    """Damage a checkpoint; return how, and whether its checksums fit afterwards."""
    names = sorted(os.listdir(folder))
    name = numbers.choice(names)
    path = folder / name
    is_document = name.endswith(".json")
    kind = numbers.randrange(10)
    if kind <= 2:
        path.write_bytes(_mutate_bytes(path.read_bytes(), numbers))
        return f"raw {name}"
    if kind <= 6 and is_document:
        if numbers.random() < 0.3:
            path.write_bytes(_signed_text(path.read_bytes(), numbers))
        else:
            value = _documents.parse(path.read_bytes())
            _mutate_json(value, numbers)
            with contextlib.suppress(ValueError):
                path.write_bytes(_documents.dump(value))
        return f"signed {name}"
    if kind <= 8:
        _mutate_header(folder, numbers.randrange(NUM_RANKS), numbers)
        return "signed header"
    path.unlink()
    what = numbers.randrange(5)
    if what == 0:
        path.symlink_to(folder.parent / "secret")
    elif what == 1:
        os.mkfifo(path)
    elif what == 2:
        path.mkdir()
    elif what == 3:
        shutil.copy(folder / numbers.choice([n for n in names if n != name]), path)
    return f"file {name} {what}"


@contextlib.contextmanager
def _only_inside(folder: Path, *, follows_links: bool = False) -> Iterator[None]:
    """Fail if a file is opened for reading by another way than inside ``folder``."""
    opened = os.open

    def check(path: Any, flags: int, *rest: Any, **kwargs: Any) -> int:
        if kwargs.get("dir_fd") is None:
            assert os.path.abspath(path) == str(folder), path
            assert flags & os.O_DIRECTORY
        else:
            assert follows_links or flags & os.O_NOFOLLOW
            assert os.path.basename(path) == path
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return opened(path, flags, *rest, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_files.os, "open", check)
        yield


def _listing(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): path.lstat().st_mtime_ns
        for path in sorted(folder.rglob("*"))
    }


class _Run:
    """A model and an optimizer of rank 0 alone; a checkpoint of three ranks' others."""

    def __init__(self, rank: int, folder: Path) -> None:
        """Collective; the rest is rank 0's."""
        self._make(dist.group.WORLD)
        self.step()
        checkpoint.save(
            folder / "good",
            self.model,
            self.optim,
            scheduler=self.scheduler,
            extra={"order": torch.arange(5), "position": [1, 2]},
        )
        weights = full_state_dict(self.model)
        self.group = dist.new_group([0])
        if rank != 0:
            return
        self._make(self.group)
        self.step()
        self.load(folder / "good")
        self.saved = self.state()
        for name, weight in weights.items():
            assert torch.equal(self.saved[name], weight)
        self.step()
        self.before = self.state()
        checkpoint.save(
            folder / "before",
            *(self.model, self.optim),
            scheduler=self.scheduler,
            process_group=self.group,
        )

    def _make(self, group: Any) -> None:
        torch.manual_seed(0)
        self.model = fsdp(
            MLP(), units={Block}, process_group=group, use_orig_params=True
        )
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optim, 1)

    def step(self) -> None:
        self.optim.zero_grad()
        self.model(torch.randn(4, 6)).sum().backward()
        self.optim.step()
        self.scheduler.step()

    def state(self) -> dict[str, torch.Tensor]:
        state = {k: v.clone() for k, v in full_state_dict(self.model).items()}
        for key, values in self.optim.state_dict()["state"].items():
            for name, value in values.items():
                state[f"{key}.{name}"] = value.clone()
        state["lr"] = torch.tensor(self.optim.param_groups[0]["lr"])
        return state

    def load(self, path: Path) -> checkpoint.Loaded:
        return checkpoint.load(
            path,
            *(self.model, self.optim),
            scheduler=self.scheduler,
            strict=True,
            process_group=self.group,
        )

    def take(self, folder: Path) -> Any:
        return checkpoint.import_safetensors(
            folder, self.model, process_group=self.group
        )

    def reset(self, folder: Path) -> None:
        self.load(folder / "before")


def _outcome(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a call returns, or why it refuses."""
    try:
        return call(), ""
    except checkpoint.CheckpointError as error:
        message = str(error)
    found = INTERNAL.search(message.replace("does not take the state", ""))
    assert found is None or "does not take the state" in message, message
    return None, message


def _check(run: _Run, path: Path, how: str) -> bool:
    """Load and verify a damaged checkpoint; return whether it was refused."""
    found, message = _outcome(lambda: run.load(path))
    was_refused = found is None
    if found is None:
        assert "in part only" not in message, message
        assert_same_tensors("after a refusal", run.state(), run.before, 0.0)
    else:
        state = run.state()
        if how.startswith("signed"):  # someone may change a number and sign it
            state = {k: v for k, v in state.items() if k in full_state_dict(run.model)}
            expected = {k: run.saved[k] for k in state}
            assert_same_tensors("loaded", state, expected, 0.0)
        else:
            assert_same_tensors("loaded", state, run.saved, 0.0)
            assert found.extra["position"] == [1, 2]
    info, _ = _outcome(lambda: checkpoint.verify(path))
    if was_refused and not how.startswith("signed"):
        assert info is None, f"verify does not find: {message}"
    return was_refused


@numbers_of_cases
@distributed(world_size=NUM_RANKS, timeout_s=1200.0)
def test_hostile_files(rank: int, tmp_path: Path, num_cases: int) -> None:
    run = _Run(rank, tmp_path)
    if rank != 0:
        return
    (tmp_path / "secret").write_text("secret")
    path = tmp_path / "bad"
    num_refused = 0
    for case in range(num_cases):
        numbers = random.Random(seed_of("fuzz", case))
        shutil.copytree(tmp_path / "good", path)
        how = _mutate(path, numbers)
        before = _listing(tmp_path)
        try:
            with _only_inside(path):
                was_refused = _check(run, path, how)
            assert _listing(tmp_path) == before, "files changed"
        except Exception as error:
            msg = f"case {case} ({how}): {error!r:.2000}"
            raise AssertionError(msg) from error
        num_refused += was_refused
        if not was_refused:
            run.reset(tmp_path)
        shutil.rmtree(path)
    assert num_refused > 0.7 * num_cases
    dist.destroy_process_group(run.group)


def _mutate_set(folder: Path, numbers: random.Random) -> None:
    """Damage the index, or the header of a file."""
    path = folder / numbers.choice(sorted(os.listdir(folder)))
    data = path.read_bytes()
    if path.suffix == ".json":
        value = json.loads(data)
        _mutate_json(value, numbers)
        data = json.dumps(value).encode()
    else:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        _mutate_json(header, numbers)
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    if numbers.random() < 0.3:
        data = _mutate_bytes(data, numbers)
    path.write_bytes(data)


@numbers_of_cases
@distributed(world_size=NUM_RANKS, timeout_s=600.0)
def test_hostile_sets(rank: int, tmp_path: Path, num_cases: int) -> None:
    """Files to import have no checksums: refused in words, or read as they say."""
    num_cases //= 2
    run = _Run(rank, tmp_path)
    if rank != 0:
        return
    good = tmp_path / "set"
    checkpoint.export(tmp_path / "good", good, max_shard_size=1000)
    path = tmp_path / "bad"
    num_refused = 0
    for case in range(num_cases):
        shutil.copytree(good, path)
        _mutate_set(path, random.Random(seed_of("set", case)))
        before = _listing(tmp_path)
        try:
            with _only_inside(path, follows_links=True):
                found, message = _outcome(lambda: run.take(path))
            assert "in part only" not in message, message
            assert _listing(tmp_path) == before, "files changed"
        except Exception as error:
            msg = f"case {case}: {error!r:.2000}"
            raise AssertionError(msg) from error
        if found is None:
            num_refused += 1
            assert_same_tensors(f"case {case}", run.state(), run.before, 0.0)
        else:
            run.take(good)
            run.before = run.state()
        shutil.rmtree(path)
    assert num_refused > 0.6 * num_cases
    dist.destroy_process_group(run.group)
