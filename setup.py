"""Builds fsdp_c: one extension of the C rooms and the C++ bridge.

Torch's BuildExtension is not used: it compiles `.c` files as C++, and its progress is
the whole command line of each compiler.

Environment switches: FSDP_C_DEBUG=1 (no optimisation, asserts and symbols),
FSDP_C_SANITIZE=1 (address and undefined behaviour sanitizers; preload libasan
to import the result), FSDP_C_CUDA=0|1 (the CUDA kernels: never, or insist; without
it they are built where nvcc is found and torch is a CUDA build), MAX_JOBS (how many
compilers run at a time), CC, CXX, CFLAGS, CXXFLAGS and LDFLAGS.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from runpy import run_path
from typing import NoReturn

import setuptools
from setuptools.command.build_ext import build_ext

VERSION = "0.2.0"

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


def find_compiler(variable: str, fallback: str) -> list[str]:
    """Return the command of the compiler that ``variable`` names."""
    command = shlex.split(
        os.environ.get(variable) or sysconfig.get_config_var(variable) or fallback
    )
    if shutil.which(command[0]) is None:
        stop(
            f"the compiler {command[0]!r} is not on PATH, install gcc and g++ or "
            f"set {variable}"
        )
    return command


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
CC = find_compiler("CC", "cc")
CXX = find_compiler("CXX", "c++")


KERNELS = run_path("csrc/cuda/build.py")


def wants_cuda() -> bool:
    """Return whether to build the library of kernels with nvcc."""
    nvcc = KERNELS["find_nvcc"]()
    if os.environ.get("FSDP_C_CUDA", "") == "":
        return nvcc is not None and torch.version.cuda is not None
    if switch("FSDP_C_CUDA") and nvcc is None:
        stop(
            "FSDP_C_CUDA=1 asks for the CUDA kernels and there is no nvcc, install "
            "the CUDA toolkit and set CUDA_HOME, or unset FSDP_C_CUDA (CUDA tensors "
            "work through torch without them)"
        )
    return switch("FSDP_C_CUDA")


from torch.utils import cpp_extension  # noqa: E402

DEBUG = switch("FSDP_C_DEBUG")
SANITIZE = switch("FSDP_C_SANITIZE")
CUDA = wants_cuda()
JOBS = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))

# Kept between builds, also those that pip starts, so that they are incremental.
BUILD_DIR = (
    f"build/{sys.implementation.cache_tag}-torch{torch.__version__}"
    f"{'-debug' if DEBUG else ''}{'-sanitize' if SANITIZE else ''}"
    f"{'-cuda' if CUDA else ''}"
)
HEADERS = sorted(glob("csrc/**/*.h*", recursive=True))
SOURCES = sorted(glob("csrc/**/*.c*", recursive=True))
CUDA_SOURCES = [*sorted(glob("csrc/cuda/*")), "csrc/core/base/status.c", *HEADERS]
EXPORTS = "csrc/exports.map"

SANITIZE_FLAGS = ["-fsanitize=address,undefined"] if SANITIZE else []
# -iquote and not -I: <torch/...> must never find a header of csrc/torch.
COMMON_FLAGS = [
    f'-DFSDP_C_VERSION="{VERSION}"',
    f'-DFSDP_C_TORCH_VERSION="{torch.__version__}"',
    f"-DFSDP_C_CUDA={int(CUDA)}",
    f"-DFSDP_C_ROCM={int(torch.version.hip is not None)}",
    *(["-O0", "-g"] if DEBUG else ["-O2", "-DNDEBUG"]),
    *SANITIZE_FLAGS,
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-iquote",
    "csrc/core",
    "-iquote",
    "csrc",
]
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
    "-Werror=implicit-function-declaration",
]
CXX_FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Wconversion"]
# Without it torch's headers declare each operator in every file.
CXX_FLAGS += ["-DAT_PER_OPERATOR_HEADERS"]
for folder in (sysconfig.get_path("include"), *cpp_extension.include_paths()):
    CXX_FLAGS += ["-isystem", folder]
# In host all loops over elements are vectorised, products and sums not fused.
# In python METH_KEYWORDS needs the cast.
ROOM_FLAGS = {
    "core": [],
    # Without optimisation the intrinsics are macros, whose masks are ints.
    "host": ["-ffp-contract=off", "-Wno-sign-conversion" if DEBUG else "-O3"],
    "nccl": ["-D_GNU_SOURCE"],
    "python": ["-isystem", sysconfig.get_path("include"), "-Wno-cast-function-type"],
    "shm": ["-D_GNU_SOURCE"],
}


def flags_of(variable: str) -> list[str]:
    """Return the flags in the environment variable ``variable``."""
    return shlex.split(os.environ.get(variable, ""))


@dataclass(frozen=True)
class Step:
    """One run of a compiler: writes ``target`` and, to ``target``.d, what it read."""

    name: str
    target: str
    command: list[str]

    def is_done(self) -> bool:
        """Return whether neither the command nor a file that it read has changed."""
        try:
            done = Path(f"{self.target}.done").read_text()
            read = Path(f"{self.target}.d").read_text().replace("\\\n", " ").split()
            built = os.path.getmtime(self.target)
            return done == shlex.join(self.command) and all(
                os.path.getmtime(path) <= built for path in read[1:]
            )
        except FileNotFoundError:
            return False

    def run(self) -> None:
        """Run the compiler; end the build with its message if it fails."""
        done = Path(f"{self.target}.done")
        done.parent.mkdir(parents=True, exist_ok=True)
        done.unlink(missing_ok=True)
        result = subprocess.run(self.command, check=False, stderr=subprocess.PIPE)
        sys.stderr.write(result.stderr.decode(errors="replace"))
        if result.returncode != 0:
            stop(f"{self.name} does not compile (see above)")
        done.write_text(shlex.join(self.command))


def compilation(source: str, command: list[str]) -> Step:
    """Describe the compilation of one source."""
    target = f"{BUILD_DIR}/{source.removeprefix(f'{BUILD_DIR}/')}.o"
    output = ["-MMD", "-MF", f"{target}.d", "-c", source, "-o", target]
    return Step(source, target, [*command, *output])


def room_steps() -> list[Step]:
    """Describe the compilations of the C rooms."""
    command = [*CC, *C_FLAGS, *COMMON_FLAGS]
    return [
        compilation(source, [*command, *flags, *flags_of("CFLAGS")])
        for room, flags in ROOM_FLAGS.items()
        for source in sorted(glob(f"csrc/{room}/**/*.c", recursive=True))
    ]


# Torch's expensive headers, the most expensive ones first: sources that include some of
# the first folder are compiled together, then those that include some of the second,
# then the rest.
HEADER_FOLDERS = ("torch/csrc/distributed/", "torch/csrc/")


def bridge_steps() -> list[Step]:
    """Describe the compilations of the bridge, several sources each.

    Torch's headers take a compiler longer than a source of ours, so each compiler run
    reads them for all sources that need the same. A precompiled header saves less: it
    takes two runs' time and 560 MB, and each run with it still instantiates torch's
    inline code, which is half of the work.
    """
    joined: dict[str, list[str]] = {folder: [] for folder in (*HEADER_FOLDERS, "")}
    for source in sorted(glob("csrc/torch/**/*.cpp", recursive=True)):
        text = Path(source).read_text()
        needed = (each for each in HEADER_FOLDERS if f"#include <{each}" in text)
        joined[next(needed, "")].append(source)
    command = [*CXX, *CXX_FLAGS, *COMMON_FLAGS]
    command += flags_of("CXXFLAGS") or flags_of("CFLAGS")
    steps = []
    for index, names in enumerate(joined.values()):
        text = "".join(f'#include "{name.removeprefix("csrc/")}"\n' for name in names)
        path = Path(BUILD_DIR, f"bridge_{index}.cpp")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        step = compilation(str(path), command)
        steps.append(replace(step, name=f"{names[0]} ... {names[-1]}"))
    return steps


def run_steps(steps: list[Step]) -> None:
    """Run the steps that are not done, JOBS at a time, and show the progress."""
    steps = [step for step in steps if not step.is_done()]
    numbers = itertools.count(1)

    def run(step: Step) -> None:
        # One write, so that lines of two threads do not mix.
        sys.stdout.write(f"[{next(numbers)}/{len(steps)}] {step.name}\n")
        sys.stdout.flush()
        step.run()

    with ThreadPoolExecutor(JOBS) as pool:
        futures = [pool.submit(run, step) for step in steps]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def link_step(objects: list[str]) -> Step:
    """Describe how the extension is linked.

    The export list also localises the weak symbols that torch's headers leave
    in every object, which -fvisibility=hidden does not.
    """
    target = f"{BUILD_DIR}/_native.so"
    Path(f"{target}.d").write_text(f"{target}: {' '.join([*objects, EXPORTS])}")
    command = [*CXX, "-shared", *SANITIZE_FLAGS, *objects, "-o", target]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    # Before glibc 2.34 -ldl was a library of its own.
    command += ["-pthread", "-ldl", f"-Wl,--version-script={EXPORTS}"]
    return Step("_native.so", target, [*command, *flags_of("LDFLAGS")])


class BuildNative(build_ext):
    """build_ext that keeps what it compiles and compiles only what is out of date.

    The kernels for GPUs are a library of their own beside the extension, without torch.
    """

    def build_extension(self, ext: setuptools.Extension) -> None:
        # The bridge first: its compilations are the long ones.
        compilations = [*bridge_steps(), *room_steps()]
        run_steps(compilations)
        link = link_step([step.target for step in compilations])
        run_steps([link])
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(link.target, target)

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


def is_older(target: str, sources: list[str]) -> bool:
    """Return whether ``target`` is missing or older than one of ``sources``."""
    if not os.path.exists(target):
        return True
    built = os.path.getmtime(target)
    return any(os.path.getmtime(source) > built for source in sources)


setuptools.setup(
    version=VERSION,
    ext_modules=[
        setuptools.Extension(
            "fsdp_c._native", SOURCES, depends=[*HEADERS, EXPORTS, "setup.py"]
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
