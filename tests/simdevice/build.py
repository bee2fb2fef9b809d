"""Builds the simulated device, once for given sources, torch and Python."""

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = HERE / "csrc"

CORE = ("sim_streams.c", "sim_memory.c", "sim_graph.c")
# It includes the other C++ sources.
BRIDGE = ("joined.cpp",)
C_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-fPIC", "-Wall", "-Wextra")
CXX_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra")
SYSTEM = ("-lm", "-lpthread", "-ldl")


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        shown = " ".join(command)
        raise RuntimeError(f"failed: {shown}\n{result.stdout}{result.stderr}")


def _key(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for fact in (torch.__version__, sys.version, *C_FLAGS, *CXX_FLAGS):
        digest.update(fact.encode())
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(source: Path, folder: Path) -> str:
    """Return the object of one file; it is kept for its own content and headers."""
    is_c = source.suffix == ".c"
    included = CSRC.glob("*.h*" if is_c else "*.[ch]pp")
    target = folder / f"{source.stem}.{_key([source, *included])}.o"
    if target.exists():
        return str(target)
    includes = [f"-I{sysconfig.get_paths()['include']}", "-iquote", str(CSRC)]
    for path in cpp_extension.include_paths():
        includes += ["-isystem", path]
    partial = target.with_suffix(".partial")
    if is_c:
        _run("gcc", *C_FLAGS, "-c", str(source), "-o", str(partial))
    else:
        name = "-DTORCH_EXTENSION_NAME=_sim_native"
        command = ["g++", *CXX_FLAGS, name, *includes, "-c", str(source)]
        _run(*command, "-o", str(partial))
    partial.rename(target)
    return str(target)


def build() -> Path:
    """Return the folder with `libsimcore.so` and `_sim_native.so`, built if needed.

    The C core is a library of its own, so that a fake libnccl can enqueue tasks on
    the same streams.
    """
    folder = ROOT / "build" / "simdevice"
    folder.mkdir(parents=True, exist_ok=True)
    sources = [CSRC / name for name in (*CORE, *BRIDGE)]
    out = folder / _key([*CSRC.iterdir(), Path(__file__)])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (out / "done").exists():
            return out
        out.mkdir(exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(lambda path: _compile(path, folder), sources))
        core, bridge = objects[: len(CORE)], objects[len(CORE) :]
        _run("gcc", "-shared", *core, "-lpthread", "-o", f"{out}/libsimcore.so")
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        libraries += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
        runpath = ["-Wl,-rpath,$ORIGIN", f"-L{out}", "-lsimcore"]
        target = f"{out}/_sim_native.so"
        _run("g++", "-shared", *bridge, *runpath, *libraries, "-o", target)
        (out / "done").touch()
    return out


def _c_sources(*rooms: str) -> list[str]:
    return sorted(str(path) for room in rooms for path in (ROOT / "csrc").glob(room))


def _fake_sources() -> list[str]:
    own = sorted(map(str, CSRC.glob("fake_nccl*.c")))
    return [*own, *_c_sources("shm/*.c", "host/*.c")]


def build_fake_nccl() -> Path:
    """Return the fake libnccl whose streams are the device's, built if needed."""
    out = build()
    includes = [f"-I{CSRC}", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'core'}"]
    sources = [*_fake_sources(), *_c_sources("core/base/*.c")]
    headers = [*CSRC.glob("*.h")]
    for room in ("shm", "host", "core/base", "core/port"):
        headers += (ROOT / "csrc" / room).glob("*.h")
    target = out / f"libfakenccl.{_key([*map(Path, sources), *headers])}.so"
    with (out.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            flags = ["-U_GNU_SOURCE", "-D_GNU_SOURCE=", "-fvisibility=hidden"]
            flags.append("-Wl,-z,defs")  # torch's process would say it late
            linked = [f"-L{out}", "-lsimcore", "-Wl,-rpath,$ORIGIN", *SYSTEM]
            partial = target.with_suffix(".partial")
            command = ["gcc", *C_FLAGS, *flags, *includes, "-shared", *sources]
            _run(*command, *linked, "-o", str(partial))
            partial.rename(target)
    return target


if __name__ == "__main__":
    print(build_fake_nccl() if "nccl" in sys.argv else build())
