"""Builds the library of kernels: python csrc/cuda/build.py [--hip] OUTPUT.

For CUDA it needs nvcc and a C compiler, no GPU, no torch and no installed CUDA
runtime: that is linked in. Machine code for every architecture that this nvcc knows of
ARCHITECTURES, and PTX of the newest one for those to come.

For AMD GPUs it needs hipcc, and the HIP runtime, which stays a library of its own: it
has to be the one that torch uses. Machine code for the architectures of
PYTORCH_ROCM_ARCH, or for every one that this hipcc knows of HIP_ARCHITECTURES.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1]
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
HIP_ARCHITECTURES = (
    *("gfx908", "gfx90a", "gfx942", "gfx950"),
    *("gfx1030", "gfx1100", "gfx1101", "gfx1200", "gfx1201"),
)

HOST_FLAGS = ["-fPIC", "-fvisibility=hidden", f"-fmacro-prefix-map={CSRC.parent}/="]


def find_nvcc() -> str | None:
    """Return the nvcc of CUDA_HOME or of PATH, None if there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is not None:
        return shutil.which(str(Path(home, "bin", "nvcc")))
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def find_hipcc() -> str | None:
    """Return the hipcc of ROCM_HOME, ROCM_PATH or PATH, None if there is none."""
    home = os.environ.get("ROCM_HOME") or os.environ.get("ROCM_PATH")
    if home is not None:
        return shutil.which(str(Path(home, "bin", "hipcc")))
    return shutil.which("hipcc") or shutil.which("/opt/rocm/bin/hipcc")


def hip_environment() -> dict[str, str]:
    """Return hipcc's environment: beside an nvcc it compiles for NVIDIA otherwise."""
    return {**os.environ, "HIP_PLATFORM": "amd"}


def hip_version(hipcc: str) -> str:
    """Return the version of HIP, as 6.4.43484; empty if hipcc tells none."""
    told = subprocess.run(
        [hipcc, "--version"],
        check=False,
        capture_output=True,
        text=True,
        env=hip_environment(),
    ).stdout
    found = re.search(r"HIP version: *([\d.]+)", told)
    return "" if found is None else found[1]


def hip_architectures(hipcc: str) -> list[str]:
    """Return those of PYTORCH_ROCM_ARCH, else those that this hipcc knows."""
    asked = re.split(r"[ ;,]+", os.environ.get("PYTORCH_ROCM_ARCH", "").strip())
    if any(asked):
        return [arch for arch in asked if arch]
    probe = ["-x", "hip", "-fsyntax-only", os.devnull]
    return [
        arch
        for arch in HIP_ARCHITECTURES
        if subprocess.run(
            [hipcc, f"--offload-arch={arch}", *probe],
            check=False,
            capture_output=True,
            env=hip_environment(),
        ).returncode
        == 0
    ]


def architectures(nvcc: str) -> list[int]:
    """Return which of ARCHITECTURES this nvcc knows."""
    listing = subprocess.run(
        [nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True
    ).stdout
    known = {line.strip() for line in listing.splitlines()}
    return [arch for arch in ARCHITECTURES if f"compute_{arch}" in known]


def code_flags(archs: list[int]) -> list[str]:
    """Return nvcc's options for machine code of ``archs`` and PTX of the last."""
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return [*flags, f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"]


INCLUDES = ["-I", str(CSRC / "core"), "-I", str(CSRC)]
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion"]


def compile_status(status: Path) -> list[str]:
    """Return the compilation of the core's file that the library needs."""
    cc = shlex.split(os.environ.get("CC") or "cc")
    command = [*cc, "-std=c11", "-O2", *WARNINGS, *HOST_FLAGS, *INCLUDES]
    return [*command, "-c", str(CSRC / "core/base/status.c"), "-o", str(status)]


def commands(
    nvcc: str, output: Path, folder: Path, archs: list[int]
) -> list[list[str]]:
    """Return the compilations and the link, in order."""
    status = folder / "status.o"
    kernels = folder / "kernels.o"
    compile_kernels = [nvcc, "-std=c++17", "-O3", "--threads=0", *code_flags(archs)]
    compile_kernels += ["-Xcompiler", ",".join([*HOST_FLAGS, *WARNINGS[:2]])]
    compile_kernels += [*INCLUDES, "-c", str(CSRC / "cuda/kernels.cu")]
    compile_kernels += ["-o", str(kernels)]
    exports = CSRC / "cuda/exports.map"
    link = [nvcc, "-shared", "-cudart=static", str(kernels), str(status)]
    link += ["-Xlinker", f"--no-undefined,--version-script={exports}"]
    link += ["-o", str(output)]
    return [compile_status(status), compile_kernels, link]


def hip_commands(
    hipcc: str, output: Path, folder: Path, archs: list[str]
) -> list[list[str]]:
    """Return the same for hipcc, which would fuse products and sums by itself."""
    status = folder / "status.o"
    kernels = folder / "kernels.o"
    code = [f"--offload-arch={arch}" for arch in archs]
    compile_kernels = [hipcc, "-x", "hip", "-std=c++17", "-O3", "-ffp-contract=off"]
    compile_kernels += [*code, *HOST_FLAGS, *WARNINGS[:2], *INCLUDES]
    compile_kernels += ["-c", str(CSRC / "cuda/kernels.cu"), "-o", str(kernels)]
    exports = CSRC / "cuda/exports.map"
    link = [hipcc, "-shared", *code, str(kernels), str(status)]
    link += [f"-Wl,--no-undefined,--version-script={exports}", "-o", str(output)]
    return [compile_status(status), compile_kernels, link]


def build(
    output: Path, folder: Path, archs: list[str] | None = None, *, hip: bool = False
) -> None:
    """Build the library ``output`` with objects in ``folder``.

    Raises:
        FileNotFoundError: There is no nvcc or hipcc, or none that knows a GPU.
        subprocess.CalledProcessError: A compiler failed; it said why.
    """
    compiler = find_hipcc() if hip else find_nvcc()
    if compiler is None:
        raise FileNotFoundError(
            "hipcc is neither in ROCM_HOME nor on PATH: install ROCm"
            if hip
            else "nvcc is neither in CUDA_HOME nor on PATH: install the CUDA toolkit"
        )
    folder.mkdir(parents=True, exist_ok=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    if hip:
        named = archs or hip_architectures(compiler)
        if not named:
            raise FileNotFoundError(
                f"{compiler} knows none of {', '.join(HIP_ARCHITECTURES)}: name one "
                "with --arch or PYTORCH_ROCM_ARCH"
            )
        steps = hip_commands(compiler, output, folder, named)
    else:
        numbers = [int(arch) for arch in archs or architectures(compiler)]
        steps = commands(compiler, output, folder, numbers)
    for command in steps:
        print(shlex.join(command), flush=True)
        subprocess.run(command, check=True, env=hip_environment() if hip else None)


def main() -> int:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path, help="the library, fsdp_c/_cuda.so")
    parser.add_argument("--folder", type=Path, default=Path("build/cuda"))
    parser.add_argument("--hip", action="store_true", help="for AMD GPUs, by hipcc")
    parser.add_argument(
        "--arch",
        action="append",
        help="only this architecture (90, gfx90a); may be given several times",
    )
    args = parser.parse_args()
    try:
        build(args.output, args.folder, args.arch, hip=args.hip)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"error: {error.cmd[0]} failed, see above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
