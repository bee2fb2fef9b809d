"""python -m fsdp_c doctor: what was built, and which paths are active."""

import platform
from collections.abc import Iterator

import torch
import torch.distributed as dist

from fsdp_c import _native
from fsdp_c._device import current_accelerator


def report() -> str:
    """Return the report, one fact per line, ready to be printed."""
    lines = list(_lines())
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _lines() -> Iterator[tuple[str, str]]:
    info = _native.build_info()
    yield "fsdp_c", info["version"]
    yield "module", _native.__file__ or "built in"
    yield "python", f"{platform.python_version()} (built with {info['python_built']})"
    yield "torch", f"{torch.__version__} (built with {info['torch_built']})"
    if _is_other_torch(info):
        yield (
            "warning",
            "built with another torch: run `pip install --no-build-isolation "
            "--force-reinstall --no-deps .` in the source directory",
        )
    yield "compiler", info["compiler"]
    yield "asserts", info["asserts"]
    yield "sanitizer", info["sanitizer"]
    yield "CUDA parts", f"{info['cuda']} (torch's CUDA: {torch.version.cuda or 'none'})"
    yield "accelerator", _accelerator()
    yield "collectives", _collectives(info)


def _is_other_torch(info: dict[str, str]) -> bool:
    return info["torch_built"].split("+")[0] != torch.__version__.split("+")[0]


def _accelerator() -> str:
    accelerator = current_accelerator()
    if accelerator is None:
        return "none: everything runs on the CPU"
    return f"{torch.accelerator.device_count()} x {accelerator.type}"


def _collectives(info: dict[str, str]) -> str:
    if not dist.is_available():
        return "none: this torch was built without torch.distributed"
    gloo = "gloo" if dist.is_gloo_available() else "no gloo"
    nccl = "nccl" if dist.is_nccl_available() else "no nccl"
    kernels = "native" if info["cuda"] == "yes" else "ATen"
    return f"c10d ({gloo} for the CPU, {nccl} for CUDA), {kernels} kernels"
