"""Builds the fake CUDA, once for given sources, torch and Python.

``python -m fakecuda.build`` prints the folder.
"""

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

C_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-fPIC", "-Wall", "-Wextra")
CXX_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra")
SYSTEM = ("-lpthread", "-ldl", "-lrt")


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        shown = " ".join(command)
        raise RuntimeError(f"failed: {shown}\n{result.stdout}{result.stderr}")


def _site() -> Path:
    return Path(sysconfig.get_path("purelib"))


def cuda_include() -> Path:
    """Return the folder of CUDA's headers: the toolkit's, or those of packages.

    Raises:
        FileNotFoundError: There are none.
    """
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = [Path(home, "include"), *_site().glob("nvidia/*/include")]
    needed = ("cuda_runtime_api.h", "cuda.h", "crt/host_defines.h")
    for folder in found:
        if all((folder / name).exists() for name in needed):
            return folder
    folders = ", ".join(map(str, found))
    raise FileNotFoundError(
        f"not all of {', '.join(needed)} in {folders}; torch brings some of them, the "
        "packages nvidia-cuda-crt and nvidia-cuda-cccl of its CUDA version the others"
    )


def _sources(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (HERE / room).glob("*.c"))


def _key() -> str:
    """Return a digest of all that the libraries are made of."""
    import torch

    digest = hashlib.sha256()
    for fact in (torch.__version__, sys.version, *C_FLAGS, *CXX_FLAGS):
        digest.update(fact.encode())
    csrc = ROOT / "csrc"
    ours = [*csrc.glob("cuda/*"), *csrc.glob("host/*.h"), *csrc.glob("core/base/*")]
    for path in sorted([*HERE.glob("*/*.[ch]*"), *ours]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _library(target: Path, soname: str, sources: Sequence[Path]) -> None:
    includes = ["-isystem", str(cuda_include())]
    includes += ["-isystem", str(_site() / "nvidia/nccl/include")]
    command = ["gcc", *C_FLAGS, *includes, "-shared", f"-Wl,-soname,{soname}"]
    _run(*command, *map(str, sources), "-o", str(target), *SYSTEM)


def _operators(target: Path) -> None:
    from torch.utils import cpp_extension

    includes = ["-isystem", str(cuda_include()), "-iquote", str(HERE / "operators")]
    includes += ["-isystem", sysconfig.get_paths()["include"]]
    for path in cpp_extension.include_paths():
        includes += ["-isystem", path]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += ["-lc10", "-lc10_cuda", "-ltorch", "-ltorch_cpu", "-ltorch_cuda"]
    libraries.append("-ltorch_python")
    name = "-DTORCH_EXTENSION_NAME=_fakecuda_operators"
    command = ["g++", *CXX_FLAGS, name, *includes, "-shared"]
    source = str(HERE / "operators" / "joined.cpp")
    _run(*command, source, "-o", str(target), *libraries)


def _host_code(source: str) -> str:
    """Return kernels as C++: launches are calls, large parameters references."""
    launch = r"(\w+(?:<[^<>;{}]*>)?)\s*<<<(.*?)>>>\s*\("
    source = re.sub(
        launch,
        r"fakecuda::launcher([](const auto &...x) { \1(x...); }, \2)(",
        source,
        flags=re.DOTALL,
    )
    return re.sub(r"const __grid_constant__ (\w+<\w+>) (\w+)", r"const \1 &\2", source)


def _kernels(target: Path) -> None:
    """Build csrc/cuda for the host; its launches run at their turn in the stream."""
    csrc = ROOT / "csrc"
    unit = target.with_name("kernels.cpp")
    unit.write_text(_host_code((csrc / "cuda/kernels.cu").read_text()))
    status = target.with_name("status.o")
    includes = ["-I", str(HERE / "kernels"), "-I", str(csrc / "core"), "-I", str(csrc)]
    includes += ["-isystem", str(cuda_include())]
    _run(
        "gcc",
        *C_FLAGS,
        *includes,
        "-c",
        f"{csrc}/core/base/status.c",
        "-o",
        str(status),
    )
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", *includes]
    exports = f"-Wl,--version-script={csrc}/cuda/exports.map"
    sources = [str(unit), str(HERE / "kernels" / "launch.cpp"), str(status)]
    _run(*command, "-shared", *sources, exports, "-o", str(target))


def build() -> Path:
    """Return the folder with the libraries, built if needed."""
    folder = ROOT / "build" / "fakecuda"
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / _key()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (out / "done").exists():
            return out
        out.mkdir(exist_ok=True)
        runtime = _sources("runtime", "driver")
        with ThreadPoolExecutor(3) as pool:
            made = [
                pool.submit(_library, out / "libcuda.so.1", "libcuda.so.1", runtime),
                *(
                    pool.submit(_library, out / name, name, _sources(room))
                    for room, name in (
                        ("nccl", "libnccl.so.2"),
                        ("nvml", "libnvidia-ml.so.1"),
                    )
                ),
                pool.submit(_operators, out / "_fakecuda_operators.so"),
                pool.submit(_kernels, out / "_cuda.so"),
            ]
            for each in made:
                each.result()
        (out / "done").touch()
    return out


if __name__ == "__main__":
    print(build())
