"""python -m fsdp_c doctor: what was built, which paths are active, what is wrong."""

import json
import os
import platform
import resource
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fsdp_c import _native
from fsdp_c._units.device import current_accelerator
from fsdp_c.tools.doctor._environment import BUILD_SWITCHES, SWITCHES, TORCH_SWITCHES

OLDEST_TORCH = (2, 11)
_MIB = 1024 * 1024
_MIN_SHARED_NBYTES = 64 * _MIB
_MIN_OPEN_FILES = 1024

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    section: str
    name: str
    value: str
    level: Level = "ok"
    remedy: str = ""  # what to do, where something is not as it should be


def _accelerator_type() -> str:
    """Return "cuda" and the like; "" where there is only the CPU."""
    accelerator = current_accelerator()
    return "" if accelerator is None else accelerator.type


def _cpu_features() -> frozenset[str]:
    """Return what Linux calls the flags of an x86 CPU; of others nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


@dataclass(frozen=True)
class Machine:
    """What the checks look at; tests make other ones."""

    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    num_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    shared_nbytes: int = field(default_factory=lambda: _free_nbytes("/dev/shm"))
    open_files: int = field(
        default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    )
    parts: Mapping[str, str] = field(default_factory=_native.parts)
    accelerator: str = field(default_factory=_accelerator_type)
    cpu_features: frozenset[str] = field(default_factory=_cpu_features)
    has_nccl: bool = field(
        default_factory=lambda: dist.is_available() and dist.is_nccl_available()
    )


def _free_nbytes(path: str) -> int:
    """Return the bytes that are free in a file system; -1 where it is not there."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return -1


def rows(machine: Machine | None = None) -> list[Row]:
    """Return the report."""
    machine = machine or Machine()
    return [
        *_build_rows(),
        *_device_rows(machine),
        *_gloo_rows(machine),
        *_nccl_rows(machine),
        *_other_rows(),
        *_limit_rows(),
        *_environment_rows(machine),
        *_check_flight_recorder(machine),
        *_check_threads(machine),
        *_check_shared_memory(machine),
        *_check_open_files(machine),
        *_check_debug_level(machine),
        *_check_bf16(machine),
    ]


def is_broken(report: list[Row]) -> bool:
    """Whether something cannot work as it is."""
    return any(row.level == "error" for row in report)


def as_text(report: list[Row]) -> str:
    """Return the report for people: a block for each section."""
    width = max(len(row.name) for row in report)
    lines: list[str] = []
    section = ""
    for row in report:
        if row.section != section:
            section = row.section
            lines += ["", section] if lines else [section]
        mark = "" if row.level == "ok" else f"{row.level}: "
        lines.append(f"  {row.name:<{width}}  {mark}{row.value}")
        if row.remedy:
            lines.append(f"  {'':<{width}}  -> {row.remedy}")
    num_errors = sum(row.level == "error" for row in report)
    lines += ["", f"{num_errors} broken" if num_errors else "nothing is broken"]
    return "\n".join(lines)


def as_json(report: list[Row]) -> str:
    """Return the report for programs: ``{"is_broken": ..., "rows": [...]}``."""
    content = {
        "is_broken": is_broken(report),
        "rows": [asdict(row) for row in report],
    }
    return json.dumps(content, indent=2)


def main(words: list[str]) -> int:
    """Print the report; return 1 if something is broken."""
    if words not in ([], ["--json"]):
        print("usage: python -m fsdp_c doctor [--json]")
        return 0 if words in (["-h"], ["--help"]) else 2
    report = rows()
    print(as_json(report) if words else as_text(report))
    return 1 if is_broken(report) else 0


def _build_rows() -> Iterator[Row]:
    section = "build"
    info = _native.build_info()
    yield Row(section, "fsdp_c", info["version"])
    yield Row(section, "extension", _native.__file__ or "built in")
    yield Row(
        section,
        "python",
        f"{platform.python_version()} (built with {info['python_built']})",
    )
    yield _torch_row(info["torch_built"], torch.__version__)
    yield Row(section, "compiler", info["compiler"])
    slow = "a debug build: do not time it" if info["asserts"] == "yes" else ""
    yield Row(section, "asserts", info["asserts"], "note" if slow else "ok", slow)
    yield Row(section, "sanitizer", info["sanitizer"])
    yield Row(section, "GPU kernels built", info["cuda"])


def _torch_row(built: str, loaded: str) -> Row:
    value = f"{loaded} (built with {built})"
    found = tuple(int(part) for part in loaded.split(".")[:2])
    if found < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Row("build", "torch", value, "error", f"install torch >= {oldest}")
    if built.split("+", maxsplit=1)[0] != loaded.split("+", maxsplit=1)[0]:
        remedy = (
            "built with another torch: run `pip install --no-build-isolation "
            "--force-reinstall --no-deps .` in the source directory"
        )
        return Row("build", "torch", value, "error", remedy)
    return Row("build", "torch", value)


def _device_rows(machine: Machine) -> Iterator[Row]:
    if machine.accelerator:
        count = torch.accelerator.device_count()
        yield Row("devices", "accelerator", f"{count} x {machine.accelerator}")
    else:
        yield Row("devices", "accelerator", "none: everything runs on the CPU")
    yield Row("devices", "torch's CUDA", torch.version.cuda or "none")
    yield _kernels_row(machine)


def _kernels_row(machine: Machine) -> Row:
    name = "GPU kernels"
    library = Path(_native.__file__).with_name("_cuda.so")
    why_not = machine.parts["why_no_cuda_kernels"]
    if not why_not:
        return Row("devices", name, f"used: {library}")
    if machine.accelerator != "cuda":
        built = "built, " if library.exists() else ""
        return Row("devices", name, f"{built}not used: {why_not}")
    value = f"not used ({why_not}): ATen's kernels need more launches"
    if machine.env.get("FSDP_C_CUDA") == "0":
        return Row("devices", name, value, "note", "unset FSDP_C_CUDA")
    remedy = "install nvcc, and build with FSDP_C_CUDA=1"
    remedy = "" if library.exists() else remedy
    return Row("devices", name, value, "note", remedy)


# Transports: by kind of process group, what carries its collectives, and why. ---

_SECTION = "transports"
_NOT_RUN = "not run on several GPUs by its authors yet"
_GLOO = (
    "c10d's gloo; if each host has the same number of the group's ranks, shared "
    "memory inside a host and gloo between hosts"
)
_FLAT_GLOO = (
    "c10d's gloo: a broadcast per rank to gather (up to 8 ranks), one all-to-all "
    "to reduce"
)


def _gloo_rows(machine: Machine) -> Iterator[Row]:
    name = "gloo, one host"
    if not dist.is_available():
        remedy = "install a torch with torch.distributed"
        yield Row(_SECTION, "gloo", "no torch.distributed", "error", remedy)
        return
    if not dist.is_gloo_available():
        yield Row(_SECTION, "gloo", "this torch has no gloo", "note")
        return
    why_not = machine.parts["why_no_shm"].removeprefix("rank 0: ")
    if machine.env.get("FSDP_C_TRANSPORT") == "c10d":
        remedy = "unset FSDP_C_TRANSPORT on all ranks"
        value = "c10d's gloo: shared memory is switched off by FSDP_C_TRANSPORT=c10d"
        yield Row(_SECTION, name, value, "note", remedy)
    elif why_not:
        value = f"c10d's gloo, slower: no shared memory, {why_not}"
        remedy = "fix what failed, or allow it more memory; see docs/internals/shm.md"
        yield Row(_SECTION, name, value, "warning", remedy)
    else:
        yield Row(
            _SECTION,
            name,
            "shared memory, where it works between all ranks of the group: up to 17 "
            "MiB per rank and group, if all of it is at most half of the free memory",
        )
    is_flat = machine.env.get("FSDP_C_TRANSPORT") in ("c10d", "flat")
    yield Row(_SECTION, "gloo, several hosts", _FLAT_GLOO if is_flat else _GLOO)


def _nccl_rows(machine: Machine) -> Iterator[Row]:
    parts = machine.parts
    why_not = parts["why_no_nccl"]
    is_forced = "FSDP_C_NCCL_LIBRARY" in machine.env
    is_off = machine.env.get("FSDP_C_TRANSPORT") == "c10d"
    if not machine.has_nccl:
        yield Row(_SECTION, "nccl", "no such groups: this torch has no NCCL")
    elif is_off:
        value = "the group's own c10d backend: switched off by FSDP_C_TRANSPORT=c10d"
        remedy = "unset FSDP_C_TRANSPORT on all ranks"
        yield Row(_SECTION, "nccl", value, "note", remedy)
    elif why_not:
        value = "the group's own c10d backend: no usable libnccl"
        remedy = "install NCCL 2.18 or newer"
        if is_forced:
            remedy = "correct FSDP_C_NCCL_LIBRARY, or unset it"
        yield Row(_SECTION, "nccl", value, "warning", remedy)
    else:
        value = f"NCCL directly; {_NOT_RUN}, FSDP_C_TRANSPORT=c10d goes back to c10d"
        yield Row(_SECTION, "nccl", value)

    if not why_not:
        found = f"{parts['nccl_version']}, {parts['nccl_origin']}: {parts['nccl_path']}"
        yield Row(_SECTION, "libnccl", found)
    elif machine.has_nccl or is_forced:
        yield Row(_SECTION, "libnccl", f"none: {why_not}")
    else:
        yield Row(_SECTION, "libnccl", "none (not needed)")


def _other_rows() -> Iterator[Row]:
    yield Row(_SECTION, "other groups", "the group's own c10d backend")
    yield Row(
        _SECTION,
        "of a given group",
        "call fsdp_c._native.transport(group, device) after the first step to see "
        "which one, and why; all ranks use the same",
    )


def _limit_rows() -> Iterator[Row]:
    section = "time limits"
    if dist.is_available():
        gloo = c10d.default_pg_timeout.total_seconds()
        yield Row(
            section,
            "a collective",
            f"the group's timeout, {gloo:g} s unless set: "
            "init_process_group(timeout=...), new_group(timeout=...)",
        )
    yield Row(section, "the post-mortem after it", "5 s")


def _environment_rows(machine: Machine) -> Iterator[Row]:
    for section, switches in (
        ("environment", SWITCHES),
        ("environment, torch's", TORCH_SWITCHES),
        ("environment, of the build", BUILD_SWITCHES),
    ):
        for switch in switches:
            text = machine.env.get(switch.name)
            value = f"not set ({switch.default})" if text is None else repr(text)
            yield Row(section, switch.name, f"{value}; {switch.meaning}")


# Problems that are often met: each check gives a row only where there is one. ---


def _check_flight_recorder(machine: Machine) -> Iterator[Row]:
    if machine.env.get("TORCH_FR_BUFFER_SIZE") != "0":
        yield Row(
            "found",
            "flight recorder",
            "c10d takes the GIL in every gloo collective to record a stack; "
            "collectives through shared memory do not",
            "note",
            "set TORCH_FR_BUFFER_SIZE=0 for training on CPUs of several hosts",
        )


def _check_threads(machine: Machine) -> Iterator[Row]:
    ranks = machine.env.get("LOCAL_WORLD_SIZE", "1")
    threads = machine.env.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
    if not ranks.isdecimal() or not threads.isdecimal():
        return
    num_threads = int(ranks) * int(threads)
    if num_threads > machine.num_cores:
        yield Row(
            "found",
            "threads",
            f"{ranks} ranks x {threads} threads on {machine.num_cores} cores",
            "warning",
            f"set OMP_NUM_THREADS={max(1, machine.num_cores // max(1, int(ranks)))}",
        )


def _check_shared_memory(machine: Machine) -> Iterator[Row]:
    if machine.shared_nbytes < _MIN_SHARED_NBYTES:
        found = (
            "is not there"
            if machine.shared_nbytes < 0
            else f"has {machine.shared_nbytes // _MIB} MiB free"
        )
        yield Row(
            "found",
            "/dev/shm",
            f"{found}; data loader workers use it (fsdp_c does not)",
            "warning",
            "give the container more, such as docker run --shm-size=1g",
        )


def _check_open_files(machine: Machine) -> Iterator[Row]:
    limit = machine.open_files
    if limit != resource.RLIM_INFINITY and limit < _MIN_OPEN_FILES:
        yield Row(
            "found",
            "open files",
            f"{limit} at most; every rank has a connection to every other one",
            "warning",
            f"ulimit -n {_MIN_OPEN_FILES} or more",
        )


def _check_debug_level(machine: Machine) -> Iterator[Row]:
    level = machine.env.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper()
    if level not in ("OFF", ""):
        yield Row(
            "found",
            "TORCH_DISTRIBUTED_DEBUG",
            f"{level}: the ranks exchange 8 bytes before every collective",
            "note",
            "unset it after debugging: it slows every step",
        )


def _check_bf16(machine: Machine) -> Iterator[Row]:
    features = machine.cpu_features
    has_units = not features or features & {"avx512_bf16", "amx_bf16"}
    if not machine.accelerator and not has_units:
        yield Row(
            "found",
            "bf16",
            "this CPU multiplies bf16 in software; torch.optim.Muon does so in every "
            "step, and bf16 parameters in every forward and backward",
            "note",
            "compare with a step in fp32; for Muon, an implementation that "
            "multiplies in fp32",
        )
