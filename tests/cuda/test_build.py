"""The kernels compile, link and agree with csrc/host; no GPU is needed.

The library is built for one architecture here, by the script that setup.py runs; the
kernels' split of the work is run block by block and thread by thread on the host.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "csrc" / "cuda"
SCRIPT = CUDA / "build.py"
BUILD = run_path(str(SCRIPT))
# Symbols of the C and C++ runtimes; anything else would be looked up in vain.
RUNTIMES = ("@GLIBC_", "@CXXABI_", "@GLIBCXX_", "@GCC_")

needs_hipcc = pytest.mark.skipif(
    BUILD["find_hipcc"]() is None, reason="there is no hipcc: install ROCm"
)
needs_nvcc = pytest.mark.skipif(
    BUILD["find_nvcc"]() is None, reason="there is no nvcc: install the CUDA toolkit"
)


def run(*command: object) -> str:
    """Run a command and return what it printed, or fail with it."""
    done = subprocess.run(
        [str(part) for part in command],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        # The fake CUDA is preloaded, and a sanitizer must come first.
        env={k: v for k, v in os.environ.items() if k != "LD_PRELOAD"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    run(sys.executable, SCRIPT, folder / "_cuda.so", "--folder", folder, "--arch", 90)
    return folder / "_cuda.so"


def test_every_cu_file_is_compiled() -> None:
    place = Path("out"), Path("folder")
    for commands in (
        BUILD["commands"]("nvcc", *place, [90]),
        BUILD["hip_commands"]("hipcc", *place, ["gfx90a"]),
    ):
        compiled = {part for command in commands for part in command}
        assert {str(path) for path in CUDA.rglob("*.cu")} <= compiled


def test_products_and_sums_are_not_fused_for_amd() -> None:
    """The bits are to be those of the CPU; hipcc fuses them by default."""
    commands = BUILD["hip_commands"]("hipcc", Path("o"), Path("f"), ["gfx90a"])
    assert "-ffp-contract=off" in commands[1]


FAKE_HIPCC = """#!/bin/sh
[ "$HIP_PLATFORM" = amd ] || exit 1
case "$*" in
  --version) echo "HIP version: 6.4.43484-123eb5128" ;;
  *gfx90a*|*gfx942*) ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture
def fake_hipcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "bin" / "hipcc"
    path.parent.mkdir()
    path.write_text(FAKE_HIPCC)
    path.chmod(0o755)
    monkeypatch.setenv("ROCM_HOME", str(tmp_path))
    monkeypatch.delenv("PYTORCH_ROCM_ARCH", raising=False)
    return str(path)


def test_what_a_hipcc_tells(
    fake_hipcc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version; which architectures it knows, unless the user chooses."""
    assert BUILD["find_hipcc"]() == fake_hipcc
    assert BUILD["hip_version"](fake_hipcc) == "6.4.43484"
    assert BUILD["hip_architectures"](fake_hipcc) == ["gfx90a", "gfx942"]
    monkeypatch.setitem(BUILD["build"].__globals__, "HIP_ARCHITECTURES", ("gfx1",))
    with pytest.raises(FileNotFoundError, match="knows none of gfx1: name one with"):
        BUILD["build"](tmp_path / "x.so", tmp_path, hip=True)
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx1100;gfx1101")
    assert BUILD["hip_architectures"](fake_hipcc) == ["gfx1100", "gfx1101"]


@pytest.mark.skipif(torch.version.hip is not None, reason="it is of this torch's ROCm")
def test_hip_kernels_need_the_rocm_of_torch(fake_hipcc: str) -> None:
    """Two HIP runtimes in a process do not know each other's streams."""
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "FSDP_C_HIP": "1"},
    )
    assert done.returncode != 0
    assert "torch has HIP None and hipcc has 6.4.43484: install the" in done.stderr


@pytest.mark.only_full
@needs_hipcc
def test_compiled_for_amd(tmp_path: Path) -> None:
    """One symbol comes out, and nothing but the runtimes is needed."""
    library = tmp_path / "_cuda.so"
    script = [sys.executable, SCRIPT, "--hip", library, "--folder", tmp_path]
    run(*script, "--arch", "gfx90a")
    exported = run("nm", "-D", "--defined-only", library).splitlines()
    assert [line.split()[-1] for line in exported] == ["fsdp_cuda_kernels_table"]
    needed = run("nm", "-D", "--undefined-only", library).split()
    names = [name for name in needed if len(name) > 1]
    known = ("hip", "__hip", "_ITM_", "__gmon_start__")
    others = [name for name in names if not name.startswith(known)]
    assert all(any(each in name for each in RUNTIMES) for name in others), others


@needs_nvcc
def test_all_architectures_are_known() -> None:
    archs = BUILD["architectures"](BUILD["find_nvcc"]())
    assert {80, 86, 89, 90} <= set(archs) <= set(BUILD["ARCHITECTURES"])
    flags = BUILD["code_flags"](archs)
    assert flags[-1].endswith(f"code=compute_{archs[-1]}")  # PTX for later GPUs


@pytest.mark.only_full
@needs_nvcc
def test_the_library_needs_only_the_runtimes(library: Path) -> None:
    undefined = [
        line.split()
        for line in run("nm", "-D", "--undefined-only", library).splitlines()
    ]
    wrong = [
        name
        for kind, name in undefined
        if kind != "w" and not any(runtime in name for runtime in RUNTIMES)
    ]
    assert not wrong, f"undefined symbols: {wrong}"


@pytest.mark.only_full
@needs_nvcc
def test_only_the_table_is_exported(library: Path) -> None:
    listing = run("nm", "-D", "--defined-only", library)
    names = {line.split()[-1] for line in listing.splitlines()}
    assert names == {"fsdp_cuda_kernels_table"}


class Error(ctypes.Structure):
    """The C core's ``fsdp_error``."""

    _fields_ = (
        ("status", ctypes.c_int),
        ("line", ctypes.c_int),
        ("file", ctypes.c_char_p),
        ("message", ctypes.c_char * 1024),
    )


@pytest.mark.only_full
@needs_nvcc
def test_the_table_or_the_reason(library: Path) -> None:
    # In a process of its own: with a driver, this makes a CUDA context.
    code = f"""
import ctypes, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_build import Error
table = ctypes.CDLL({str(library)!r}).fsdp_cuda_kernels_table
table.restype = ctypes.c_void_p
error = Error()
found = table(ctypes.byref(error))
print("table" if found else error.message.decode())
"""
    answer = run(sys.executable, "-c", code).strip()
    assert answer == "table" or answer.startswith("the CUDA kernels cannot run here: ")


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_blocks_and_threads_on_the_host(tmp_path: Path) -> None:
    flags = ["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
    flags += ["-iquote", "csrc/core", "-iquote", "csrc"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    objects = []
    for source in [*(ROOT / "csrc/host").glob("*.c"), ROOT / "csrc/core/base/status.c"]:
        objects.append(tmp_path / f"{source.stem}.o")
        run("gcc", "-std=c11", *flags, "-c", source, "-o", objects[-1])
    # The kernels read elements as words of 16 bytes, as CUDA allows.
    run(
        *("g++", "-std=c++17", "-fno-strict-aliasing", *flags),
        *("tests/cuda/kernels_on_host.cpp", *objects, "-o", tmp_path / "test"),
    )
    assert run(tmp_path / "test").strip() == "0 failed"
