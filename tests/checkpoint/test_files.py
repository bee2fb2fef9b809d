"""Documents, plain values, safetensors headers, checksums: one process, no model."""

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from fsdp_c.checkpoint import _checksums, _documents, _files, _plain, _safetensors
from fsdp_c.checkpoint._checksums import BLOCK_NBYTES

pytestmark = pytest.mark.bookkeeping

VALUE = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}}


def test_document_is_json_and_comes_back() -> None:
    data = _documents.dump(VALUE)
    assert json.loads(data)["a"] == VALUE["a"]
    assert _documents.parse(data) == VALUE


def test_every_changed_bit_of_a_document_is_seen() -> None:
    data = _documents.dump(VALUE)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"checksum|does not match"):
            _documents.parse(bytes(changed))
    for end in range(len(data)):
        with pytest.raises(ValueError, match=r"checksum|does not match"):
            _documents.parse(data[:end])


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (b'"a": 1, "a": 2}', "appears twice"),
        (b'"a": NaN}', "is not a JSON number"),
        (b'"a": -Infinity}', "is not a JSON number"),
        (b'"a": 1e999}', "too large"),
        (b'"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'"a": ' + b"9" * 10_000 + b"}", "digits"),
        (b'"a": 1} x', "Extra data"),
        (b'"a": "\xff"}', "decode"),
        (b'"a": 1', "delimiter"),
    ],
)
def test_strict_json(tail: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _documents.parse(_documents.sign(tail))


def _round_trip(value: Any) -> Any:
    tensors: list[torch.Tensor] = []

    def put(tensor: torch.Tensor) -> str:
        tensors.append(tensor)
        return str(len(tensors) - 1)

    encoded = json.loads(json.dumps(_plain.encode(value, "value", put)))
    return _plain.decode(encoded, lambda key: tensors[int(key)])


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(10**30),
        0.1,
        5e-324,
        math.inf,
        -math.inf,
        "",
        "\ud800 \u00e9",
        b"",
        b"\x00\xff",
        [],
        (),
        [(1, [2, (3,)])],
        {},
        {"a": {"b": ()}},
        {1: 2, None: 3, (1, "a"): 4, "$x": 5},
        {"$tuple": [1]},
        {"$set": [1]},
        set(),
        {1, "a", (2, None), False},
    ],
)
def test_plain_values(value: Any) -> None:
    found = _round_trip(value)
    assert found == value
    assert type(found) is type(value)


def test_plain_tensors() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for number in (0.1, -0.0, math.inf, 1e-45):
            scalar = torch.tensor(number, dtype=dtype)
            found = _round_trip(scalar)
            assert found.dtype == dtype
            assert torch.equal(
                found.view(-1).view(torch.uint8), scalar.view(-1).view(torch.uint8)
            )
        assert torch.isnan(_round_trip(torch.tensor(math.nan, dtype=dtype)))
    for dtype in (torch.int64, torch.uint8, torch.bool):
        scalar = torch.tensor(1, dtype=dtype)
        assert torch.equal(_round_trip(scalar), scalar)
    assert torch.equal(_round_trip([torch.arange(3)])[0], torch.arange(3))


UNKNOWN = "is not a value that a checkpoint can hold"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"$what": 1}, UNKNOWN),
        ({"$tuple": 1}, UNKNOWN),
        ({"$float": "1"}, UNKNOWN),
        ({"$float": ["nan"]}, UNKNOWN),
        ({"$bytes": "xx"}, "'xx' is not hexadecimal"),
        ({"$set": 1}, UNKNOWN),
        ({"$set": [[]]}, "a member of .* unhashable"),
        ({"$set": [1, 1]}, "appears twice"),
        ({"$dict": [[1]]}, "is not a list of keys and values"),
        ({"$dict": [[[], 1]]}, "a key of .* unhashable"),
        ({"$dict": [[1, 1], [1, 2]]}, "appears twice"),
        ({"$scalar": ["F32", 1]}, "1 is not a scalar of dtype F32"),
        ({"$scalar": ["F32", 0.1]}, r"0\.1 is not a value of dtype F32"),
        ({"$scalar": ["F16", 1e9]}, r"1000000000\.0 is not a value of dtype F16"),
        ({"$scalar": ["I8", 300]}, "300 is not a value of dtype I8"),
        ({"$scalar": ["Q7", 1]}, "'Q7'"),
        ({"$scalar": [["F32"], 1.0]}, r"\['F32'\]"),
        ({"$scalar": []}, UNKNOWN),
        ({"$tensor": 3}, UNKNOWN),
        ({"$tuple": [], "a": 1}, UNKNOWN),
    ],
)
def test_hostile_plain_values(value: Any, message: str) -> None:
    """Each is refused for its own reason, with what is wrong in the message."""

    def no_tensor(key: str) -> torch.Tensor:
        raise AssertionError(f"asked for the tensor {key}")

    with pytest.raises(ValueError, match=message):
        _plain.decode(value, no_tensor)


def _items() -> list[_files.FileItem]:
    numbers = torch.Generator().manual_seed(0)
    return [
        _files.FileItem("a", 0, torch.randn(5, 7, generator=numbers)),
        _files.FileItem("b", 3, torch.arange(3, dtype=torch.int8)),
        _files.FileItem("empty", 0, torch.empty(0, dtype=torch.bfloat16)),
        _files.FileItem("scalar", 0, torch.tensor(2.0, dtype=torch.float64)),
        _files.FileItem("strided", 0, torch.randn(6, 4, generator=numbers).t()),
        _files.FileItem(
            "large", 9, torch.randn(3 * BLOCK_NBYTES // 4 + 5, generator=numbers)
        ),
    ]


def test_the_library_reads_our_files(tmp_path: Path) -> None:
    path = str(tmp_path / "x.safetensors")
    done = []
    written = _files.write_items(path, _items(), save_id="i", advance=done.append)
    found = load_file(path)
    for item in _items():
        assert torch.equal(found[item.key], item.tensor), item.key
        assert found[item.key].shape == item.tensor.shape
        piece = written.pieces[item.key]
        assert (piece.begin, piece.end) == (
            item.begin,
            item.begin + item.tensor.numel(),
        )
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "save_id": "i"}
    assert os.path.getsize(path) == written.nbytes == sum(done)
    with pytest.raises(FileExistsError):
        _files.write_items(path, [], save_id="i", advance=done.append)
    with pytest.raises(ValueError, match="two tensors"):
        _files.write_items(
            f"{path}2", _items()[:1] * 2, save_id="", advance=done.append
        )


def test_we_read_the_librarys_files(tmp_path: Path) -> None:
    path = str(tmp_path / "x.safetensors")
    tensors = {item.key: item.tensor.contiguous() for item in _items()}
    save_file(tensors, path, metadata={"k": "v"})
    descriptor = os.open(path, os.O_RDONLY)
    try:
        found, metadata = _safetensors.read_header(descriptor)
        assert metadata == {"k": "v"}
        for name, tensor in tensors.items():
            info = found[name]
            assert info.shape == tuple(tensor.shape)
            data = os.pread(descriptor, info.end - info.begin, info.begin)
            raw = tensor.reshape(-1).view(torch.uint8)
            assert data == bytes(raw.tolist()) or tensor.numel() > 1000
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("seed", range(20))
def test_bad_blocks_are_those_that_changed(tmp_path: Path, seed: int) -> None:
    """Against the stupid version: which ranges see which flipped byte."""
    numbers = random.Random(seed)
    path = tmp_path / "x"
    nbytes = numbers.randrange(1, 4 * BLOCK_NBYTES)
    data = bytearray(numbers.randbytes(nbytes))
    sums = _checksums.BlockSums()
    rest = memoryview(data)
    while rest:
        step = numbers.randrange(1, 2 * BLOCK_NBYTES)
        sums.update(rest[:step])
        rest = rest[step:]
    checksums = sums.finish()
    flipped = numbers.randrange(nbytes)
    data[flipped] ^= 1 << numbers.randrange(8)
    path.write_bytes(data)
    ranges = [
        (begin, numbers.randrange(begin, nbytes + 1))
        for begin in (numbers.randrange(nbytes) for _ in range(3))
    ]
    folder = _files.Folder(str(tmp_path))
    try:
        with folder.open("x") as descriptor:
            found = _files.bad_blocks(
                descriptor, ranges, nbytes, checksums, lambda _: None
            )
    finally:
        folder.close()
    first = flipped // BLOCK_NBYTES * BLOCK_NBYTES
    block = (first, min(first + BLOCK_NBYTES, nbytes))
    is_read = any(b < e and b < block[1] and block[0] < e for b, e in ranges)
    assert found == ([block] if is_read else [])


def test_files_that_are_none(tmp_path: Path) -> None:
    """Links and pipes are not opened, whatever they point at."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "folder" / "pipe")
    (tmp_path / "folder" / "sub").mkdir()
    folder = _files.Folder(str(tmp_path / "folder"))
    try:
        for name in ("link", "pipe", "sub", "none"):
            with pytest.raises(OSError, match=r"."):
                folder.read(name, 100)
        (tmp_path / "folder" / "large").write_bytes(b"x" * 101)
        with pytest.raises(ValueError, match="at most 100 are read"):
            folder.read("large", 100)
    finally:
        folder.close()
