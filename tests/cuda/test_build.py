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

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "csrc" / "cuda"
SCRIPT = CUDA / "build.py"
BUILD = run_path(str(SCRIPT))
# Symbols of the C and C++ runtimes; anything else would be looked up in vain.
RUNTIMES = ("@GLIBC_", "@CXXABI_", "@GLIBCXX_", "@GCC_")

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
    commands = BUILD["commands"]("nvcc", Path("out"), Path("folder"), [90])
    compiled = {part for command in commands for part in command}
    assert {str(path) for path in CUDA.rglob("*.cu")} <= compiled


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
    flags = ["-O0", "-g", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
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
