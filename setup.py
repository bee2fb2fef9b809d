"""Builds fsdp_c: the C rooms as static libraries, one C++ extension around them.

Environment switches: FSDP_C_DEBUG=1 (no optimisation, asserts and symbols),
FSDP_C_SANITIZE=1 (address and undefined behaviour sanitizers; preload libasan
to import the result), FSDP_C_CUDA=0|1 (the CUDA kernels: never, or insist; without
it they are built where nvcc is found and torch is a CUDA build). Torch's own
MAX_JOBS limits the jobs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from glob import glob
from pathlib import Path
from runpy import run_path
from typing import Any, NoReturn

import setuptools
from setuptools.command.build_clib import build_clib

VERSION = "0.1.0"

OLDEST_TORCH = (2, 11)
OLDEST_SETUPTOOLS = 77  # the first to read the licence field of pyproject.toml

REMEDY = "`pip install --no-build-isolation .`"


def stop(reason: str) -> NoReturn:
    """End a build that cannot work, with one sentence and no traceback."""
    raise SystemExit(f"fsdp_c cannot be built: {reason}.")


def switch(name: str) -> bool:
    """Return whether the environment switch ``name`` is on."""
    value = os.environ.get(name, "0")
    if value not in ("0", "1", ""):
        stop(f"{name} is {value!r}, set it to 0 or 1")
    return value == "1"


def find_compiler(variable: str, fallback: str) -> None:
    """Check that the compiler which ``variable`` names is there."""
    command = shlex.split(
        os.environ.get(variable) or sysconfig.get_config_var(variable) or fallback
    )
    if shutil.which(command[0]) is None:
        stop(
            f"the compiler {command[0]!r} is not on PATH, install gcc and g++ or "
            f"set {variable}"
        )


if not sys.platform.startswith("linux"):
    stop(f"it runs on Linux only, and this is {sys.platform}")
if int(setuptools.__version__.split(".")[0]) < OLDEST_SETUPTOOLS:
    stop(
        f"setuptools {setuptools.__version__} is too old, run "
        f"`pip install 'setuptools>={OLDEST_SETUPTOOLS}'` first"
    )
try:
    import torch
except ImportError as error:
    stop(
        f"torch cannot be imported in the build environment ({error}), install "
        f"torch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} first and then run {REMEDY}"
    )
if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
    stop(
        f"torch {torch.__version__} is too old, install torch >= "
        f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} first and then run {REMEDY}"
    )
if not Path(sysconfig.get_path("include"), "Python.h").is_file():
    stop("Python.h is missing, install the python3-dev package of this Python")
find_compiler("CC", "cc")
find_compiler("CXX", "c++")


def wants_cuda() -> bool:
    """Return whether to build the library of CUDA kernels."""
    nvcc = run_path("csrc/cuda/build.py")["find_nvcc"]()
    if os.environ.get("FSDP_C_CUDA", "") == "":
        return nvcc is not None and torch.version.cuda is not None
    if switch("FSDP_C_CUDA") and nvcc is None:
        stop(
            "FSDP_C_CUDA=1 asks for the CUDA kernels and there is no nvcc, install "
            "the CUDA toolkit and set CUDA_HOME, or unset FSDP_C_CUDA (CUDA tensors "
            "work through torch without them)"
        )
    return switch("FSDP_C_CUDA")


from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: E402

DEBUG = switch("FSDP_C_DEBUG")
SANITIZE = switch("FSDP_C_SANITIZE")
CUDA = wants_cuda()
JOBS = int(os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0)))))

# Kept between builds, also those that pip starts, so that they are incremental.
BUILD_DIR = (
    f"build/{sys.implementation.cache_tag}-torch{torch.__version__}"
    f"{'-debug' if DEBUG else ''}{'-sanitize' if SANITIZE else ''}"
    f"{'-cuda' if CUDA else ''}"
)
HEADERS = sorted(glob("csrc/**/*.h*", recursive=True))
SOURCES = sorted(glob("csrc/**/*.c*", recursive=True))
BRIDGE_SOURCES = sorted(glob("csrc/torch/**/*.cpp", recursive=True))
CUDA_SOURCES = [*sorted(glob("csrc/cuda/*")), "csrc/core/base/status.c", *HEADERS]
EXPORTS = "csrc/exports.map"

MACROS = [
    ("FSDP_C_VERSION", f'"{VERSION}"'),
    ("FSDP_C_TORCH_VERSION", f'"{torch.__version__}"'),
    ("FSDP_C_CUDA", "1" if CUDA else "0"),
]
# Absolute because ninja runs elsewhere; __FILE__ stays relative all the same.
ROOT = Path(__file__).resolve().parent
COMMON_FLAGS = [f"-fmacro-prefix-map={ROOT}/=", "-fPIC", "-fvisibility=hidden"]
# -iquote and not -I: <torch/...> must never find a header of csrc/torch.
COMMON_FLAGS += ["-iquote", f"{ROOT}/csrc/core", "-iquote", f"{ROOT}/csrc"]
COMMON_FLAGS += ["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O2", "-g0"]
SANITIZE_FLAGS = ["-fsanitize=address,undefined"] if SANITIZE else []
COMMON_FLAGS += SANITIZE_FLAGS
C_FLAGS = [
    "-std=c11",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wshadow",
    "-Wconversion",
    "-Wstrict-prototypes",
    "-Wmissing-prototypes",
    "-Wvla",
    "-Wundef",
    "-Wpointer-arith",
    "-Wcast-qual",
    "-Wwrite-strings",
    "-Wimplicit-fallthrough",
]
PYTHON_FLAGS = [
    "-isystem",
    sysconfig.get_path("include"),
    "-Wno-cast-function-type",  # METH_KEYWORDS needs the cast
]
# Loops over elements: all vectorised, products and sums not fused.
HOST_FLAGS = ["-ffp-contract=off", *([] if DEBUG else ["-O3"])]
CXX_FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Wconversion"]


def is_older(target: str, sources: list[str]) -> bool:
    """Return whether ``target`` is missing or older than one of ``sources``."""
    if not os.path.exists(target):
        return True
    built = os.path.getmtime(target)
    return any(os.path.getmtime(source) > built for source in sources)


class BuildLibraries(build_clib):
    """build_clib that compiles only what is out of date, several at a time."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = self.build_clib = BUILD_DIR

    def build_libraries(self, libraries: list[tuple[str, dict[str, Any]]]) -> None:
        for name, info in libraries:
            with ThreadPoolExecutor(JOBS) as pool:
                objects = list(pool.map(partial(self.update, info), info["sources"]))
            archive = self.compiler.library_filename(name, output_dir=BUILD_DIR)
            # Anew: an archive keeps the objects of sources that are gone.
            Path(archive).unlink(missing_ok=True)
            self.compiler.create_static_lib(objects, name, output_dir=BUILD_DIR)

    def update(self, info: dict[str, Any], source: str) -> str:
        """Return the object of ``source``, compiled unless it is up to date."""
        (target,) = self.compiler.object_filenames([source], output_dir=BUILD_DIR)
        if is_older(target, [source, *info["obj_deps"][""]]):
            self.compiler.compile(
                [source],
                output_dir=BUILD_DIR,
                macros=info["macros"],
                extra_postargs=info["cflags"],
            )
        return target


class BuildBridge(BuildExtension):
    """BuildExtension whose objects outlive pip's temporary directory.

    The CUDA kernels are a library of their own beside the extension, without torch.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = BUILD_DIR

    def run(self) -> None:
        super().run()
        library = f"{BUILD_DIR}/_cuda.so"
        target = Path(self.get_ext_fullpath("fsdp_c._native")).with_name("_cuda.so")
        if not CUDA:
            target.unlink(missing_ok=True)  # of an earlier build with them
            return
        if is_older(library, CUDA_SOURCES):
            script = [sys.executable, "csrc/cuda/build.py", library]
            script += ["--folder", BUILD_DIR]
            if subprocess.run(script, check=False).returncode != 0:
                stop("the CUDA kernels do not compile (see above), set FSDP_C_CUDA=0")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, target)

    def get_outputs(self) -> list[str]:
        outputs: list[str] = super().get_outputs()
        target = Path(self.get_ext_fullpath("fsdp_c._native")).with_name("_cuda.so")
        return [*outputs, str(target)] if CUDA else outputs


def library(name: str, pattern: str, flags: list[str]) -> tuple[str, dict[str, Any]]:
    """Describe one static library of C sources."""
    return name, {
        "sources": sorted(glob(pattern, recursive=True)),
        "obj_deps": {"": [*HEADERS, "setup.py"]},
        "macros": MACROS,
        "cflags": [*C_FLAGS, *COMMON_FLAGS, *flags],
    }


def joined_sources(num_files: int = 6) -> list[str]:
    """Write files that include the bridge's sources, several each; return them.

    Torch's headers take a compiler longer than a source of ours, so each compiler run
    reads them for several sources. Sources stay in order and each file gets about as
    many bytes, so that one that changes compiles few others again.
    """
    nbytes = [Path(source).stat().st_size for source in BRIDGE_SOURCES]
    texts = [""] * num_files
    begin = 0
    for source, size in zip(BRIDGE_SOURCES, nbytes, strict=True):
        index = (begin + size // 2) * num_files // sum(nbytes)
        texts[index] += f'#include "{Path(source).relative_to("csrc")}"\n'
        begin += size
    paths = []
    for index, text in enumerate(texts):
        path = Path(BUILD_DIR, f"bridge_{index}.cpp")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        paths.append(str(path))
    return paths


def bridge() -> setuptools.Extension:
    """Describe the extension: the C++ bridge, linked with the C libraries.

    The export list also localises the weak symbols that torch's headers leave
    in every object, which -fvisibility=hidden does not.
    """
    extension = CppExtension(
        "fsdp_c._native",
        joined_sources(),
        define_macros=MACROS,
        depends=[*HEADERS, *SOURCES, EXPORTS, "setup.py"],
        extra_link_args=[
            "-Wl,-u,PyInit__native",
            "-pthread",
            "-ldl",  # before glibc 2.34 these were libraries of their own
            f"-Wl,--version-script={EXPORTS}",
            *SANITIZE_FLAGS,
        ],
    )
    torch_dirs = extension.include_dirs
    extension.include_dirs = []
    extension.extra_compile_args = {
        "cxx": [
            *CXX_FLAGS,
            *COMMON_FLAGS,
            *(flag for path in torch_dirs for flag in ("-isystem", path)),
        ]
    }
    return extension


setuptools.setup(
    version=VERSION,
    # The linker reads them in this order: each room uses core.
    libraries=[
        library("fsdp_python", "csrc/python/*.c", PYTHON_FLAGS),
        library("fsdp_nccl", "csrc/nccl/*.c", ["-D_GNU_SOURCE", "-pthread"]),
        library("fsdp_shm", "csrc/shm/*.c", ["-D_GNU_SOURCE"]),
        library("fsdp_host", "csrc/host/*.c", HOST_FLAGS),
        library("fsdp_core", "csrc/core/**/*.c", []),
    ],
    ext_modules=[bridge()],
    cmdclass={"build_clib": BuildLibraries, "build_ext": BuildBridge},
)
