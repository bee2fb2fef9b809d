"""Builds the library of kernels: python csrc/cuda/build.py OUTPUT.

It needs nvcc and a C compiler, no GPU, no torch and no installed CUDA
runtime: that is linked in. Machine code for every architecture that this nvcc knows of
ARCHITECTURES, and PTX of the newest one for those to come.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1]
ARCHITECTURES = (80, 86, 89, 90, 100, 120)

HOST_FLAGS = ["-fPIC", "-fvisibility=hidden", f"-fmacro-prefix-map={CSRC.parent}/="]


def find_nvcc() -> str | None:
    """Return the nvcc of CUDA_HOME or of PATH, None if there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is not None:
        return shutil.which(str(Path(home, "bin", "nvcc")))
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


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


def build(output: Path, folder: Path, archs: list[int] | None = None) -> None:
    """Build the library ``output`` with objects in ``folder``.

    Raises:
        FileNotFoundError: There is no nvcc.
        subprocess.CalledProcessError: A compiler failed; it said why.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise FileNotFoundError(
            "nvcc is neither in CUDA_HOME nor on PATH: install the CUDA toolkit"
        )
    folder.mkdir(parents=True, exist_ok=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    for command in commands(nvcc, output, folder, archs or architectures(nvcc)):
        print(shlex.join(command), flush=True)
        subprocess.run(command, check=True)


def main() -> int:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path, help="the library, fsdp_c/_cuda.so")
    parser.add_argument("--folder", type=Path, default=Path("build/cuda"))
    parser.add_argument(
        "--arch",
        action="append",
        type=int,
        help="only this architecture, such as 90; may be given several times",
    )
    args = parser.parse_args()
    try:
        build(args.output, args.folder, args.arch)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"error: {error.cmd[0]} failed, see above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
