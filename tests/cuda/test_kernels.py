"""The CUDA kernels on a GPU against csrc/host, and csrc/host against torch.

Both are called through their C functions. Without a GPU only the second part runs.
"""

import ctypes
import math
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
BUILD = run_path(str(ROOT / "csrc/cuda/build.py"))
CODES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}
DTYPES = list(CODES)
NUMELS = [1, 7, 8, 31, 512, 1025, 40000]

needs_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA GPU"
)


class Dtype(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int32), ("itemsize", ctypes.c_int32))


class PackItem(ctypes.Structure):
    _fields_ = (
        ("to", ctypes.c_void_p),
        ("to_dtype", Dtype),
        ("from_dtype", Dtype),
        ("from_", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("add", ctypes.c_bool),
        ("is_one", ctypes.c_bool),
        ("scales_first", ctypes.c_bool),
    )


class Span(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("dtype", Dtype), ("numel", ctypes.c_int64))


Address = ctypes.c_void_p
Function = ctypes.CFUNCTYPE


class Table(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int64),
        (
            "pack",
            Function(
                *(ctypes.c_int, ctypes.POINTER(PackItem), ctypes.c_int64),
                *(ctypes.c_double, Address, Address),
            ),
        ),
        (
            "norm_scratch",
            Function(
                *(ctypes.c_int, ctypes.POINTER(Span), ctypes.c_int64),
                *(ctypes.POINTER(ctypes.c_int64), Address),
            ),
        ),
        (
            "norm",
            Function(
                *(ctypes.c_int, ctypes.POINTER(Span), ctypes.c_int64),
                *(ctypes.c_double, Address, Address, Address, Address),
            ),
        ),
        (
            "scale",
            Function(
                *(ctypes.c_int, ctypes.POINTER(Span), ctypes.c_int64),
                *(Address, Address, Address),
            ),
        ),
    )


def dtype_of(tensor: Tensor) -> Dtype:
    return Dtype(CODES[tensor.dtype], tensor.element_size())


def items_of(
    targets: Sequence[Tensor], sources: Sequence[Tensor | None], adds: Sequence[bool]
) -> Any:
    """Return pack items, one for each pair of tensors."""
    items = (PackItem * len(targets))()
    for i, (to, source) in enumerate(zip(targets, sources, strict=True)):
        data = None if source is None else source.data_ptr()
        dtype = Dtype(6, 4) if source is None else dtype_of(source)
        items[i] = PackItem(to.data_ptr(), dtype_of(to), dtype, data, to.numel())
        items[i].add = adds[i]
        items[i].scales_first = i % 3 == 1
    return items


def spans_of(tensors: Sequence[Tensor]) -> Any:
    spans = (Span * len(tensors))()
    for i, tensor in enumerate(tensors):
        spans[i] = Span(tensor.data_ptr(), dtype_of(tensor), tensor.numel())
    return spans


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("host") / "host.so"
    sources = [*(ROOT / "csrc/host").glob("*.c"), ROOT / "csrc/core/base/status.c"]
    command = ["cc", "-std=c11", "-O3", "-shared", "-fPIC", "-iquote"]
    command += [f"{ROOT}/csrc/core", "-iquote", f"{ROOT}/csrc"]
    command += [*map(str, sources), "-lm", "-o", str(path)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(path))
    library.fsdp_host_pack.argtypes = [
        *(ctypes.POINTER(PackItem), ctypes.c_int64, ctypes.c_double, Address),
    ]
    return library


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    named = os.environ.get("FSDP_C_CUDA_LIBRARY")
    if named is None and BUILD["find_nvcc"]() is None:
        pytest.skip("there is no nvcc: install the CUDA toolkit")
    if named is None:
        folder = tmp_path_factory.mktemp("cuda")
        major, minor = torch.cuda.get_device_capability()
        BUILD["build"](folder / "_cuda.so", folder, [10 * major + minor])
        named = str(folder / "_cuda.so")
    entry = ctypes.CDLL(named).fsdp_cuda_kernels_table
    entry.restype = ctypes.POINTER(Table)
    torch.cuda.current_stream().synchronize()  # makes the context
    found = entry(None)
    assert found, "the library refuses this GPU"
    return found.contents


def pack_on_host(
    host: ctypes.CDLL,
    targets: Sequence[Tensor],
    sources: Sequence[Tensor | None],
    adds: Sequence[bool],
    scale: float,
) -> None:
    items = items_of(targets, sources, adds)
    assert host.fsdp_host_pack(items, len(items), scale, None) == 0


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    equal = actual.view(width) == expected.view(width)
    return bool((equal | (actual.isnan() & expected.isnan())).all())


def values(numel: int, dtype: torch.dtype) -> Tensor:
    """Return values of many magnitudes, some of them special."""
    result = torch.randn(numel, dtype=torch.float64)
    result *= torch.randn(numel, dtype=torch.float64).mul(4).exp()
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-7, 65519.0])
    result[::11] = special.repeat(numel)[: len(result[::11])].double()
    return result.to(dtype)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("add", [False, True])
def test_the_host_has_torchs_bits(
    host: ctypes.CDLL, source: torch.dtype, target: torch.dtype, scale: float, add: bool
) -> None:
    torch.manual_seed(0)
    for numel in NUMELS:
        data, old = values(numel, source), values(numel, target)
        expected = old.clone()
        if add:
            expected.add_(data, alpha=scale)
        else:
            expected.copy_(data).mul_(scale)
        pack_on_host(host, [old], [data], [add], scale)
        assert same_bits(old, expected), numel


@needs_a_gpu
@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3])
@pytest.mark.parametrize("num_items", [1, 100, 500, 2000])
def test_pack(host: ctypes.CDLL, table: Table, scale: float, num_items: int) -> None:
    torch.manual_seed(num_items)
    numels = [NUMELS[i % 6] + i % 3 for i in range(num_items)]
    if num_items == 1:
        numels = [5_000_001]
    sources = [
        None if i % 7 == 6 else values(numel, DTYPES[i % 4])
        for i, numel in enumerate(numels)
    ]
    adds = [i % 2 == 1 for i in range(num_items)]
    expected = [values(numel, DTYPES[i // 4 % 4]) for i, numel in enumerate(numels)]
    actual = [tensor.cuda() for tensor in expected]
    on_gpu = [None if tensor is None else tensor.cuda() for tensor in sources]
    status = table.pack(
        *(items_of(actual, on_gpu, adds), num_items, scale),
        *(torch.cuda.current_stream().cuda_stream, None),
    )
    assert status == 0
    pack_on_host(host, expected, sources, adds, scale)
    for one, other in zip(actual, expected, strict=True):
        assert same_bits(one.cpu(), other)


@needs_a_gpu
@pytest.mark.parametrize("power", [1.0, 2.0, 3.0, math.inf])
def test_norm_and_scale(table: Table, power: float) -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(numel, dtype=torch.float64).to(dtype)
        for numel in [*NUMELS, 3_000_001]
        for dtype in DTYPES
    ]
    expected = torch.linalg.vector_norm(
        torch.cat([tensor.double() for tensor in tensors]), power
    ).item()
    on_gpu = [tensor.cuda() for tensor in tensors]
    spans = spans_of(on_gpu)
    stream = torch.cuda.current_stream().cuda_stream
    nbytes = ctypes.c_int64()
    assert table.norm_scratch(spans, len(spans), nbytes, None) == 0
    norms = torch.zeros(2, dtype=torch.float64, device="cuda")
    scratch = torch.empty(nbytes.value, dtype=torch.uint8, device="cuda")
    for i in range(2):
        status = table.norm(
            *(spans, len(spans), power, scratch.data_ptr()),
            *(norms[i:].data_ptr(), stream, None),
        )
        assert status == 0
    assert norms[0].item() == norms[1].item()  # the same order every time
    assert norms[0].item() == pytest.approx(expected, rel=1e-12)
    factor = torch.tensor(0.25, device="cuda")
    assert table.scale(spans, len(spans), factor.data_ptr(), stream, None) == 0
    for actual, before in zip(on_gpu, tensors, strict=True):
        assert same_bits(actual.cpu(), before * 0.25)
