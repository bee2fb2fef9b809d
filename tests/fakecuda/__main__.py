"""Runs a command on the fake CUDA: ``python -m fakecuda COMMAND...``."""

import os
import sys
from pathlib import Path

from fakecuda.build import HERE, build


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a process, and its children, on the fake CUDA."""
    libraries = [str(folder / name) for name in ("libcuda.so.1", "libnccl.so.2")]
    site = str(HERE / "site")
    paths = {"PYTHONPATH": site, "LD_LIBRARY_PATH": str(folder)}
    for name, first in paths.items():
        if os.environ.get(name):
            paths[name] = os.pathsep.join([first, os.environ[name]])
    return {
        **paths,
        "LD_PRELOAD": os.pathsep.join(libraries),
        "FAKE_CUDA_FOLDER": str(folder),
        "FSDP_C_NCCL_LIBRARY": libraries[1],
        "FSDP_C_CUDA_LIBRARY": str(folder / "_cuda.so"),
    }


def main() -> None:
    """Become the command."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m fakecuda COMMAND...")
    os.environ.update(environment(build()))
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
