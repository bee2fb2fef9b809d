"""Of a process on the fake CUDA: replaces torch's operators once torch is imported."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def _install() -> None:
    import torch

    folder = Path(os.environ["FAKE_CUDA_FOLDER"])
    name = "_fakecuda_operators"
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.so")
    assert spec is not None
    assert spec.loader is not None
    operators = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(operators)
    operators.install()
    # Composites take operators that the CPU has, too.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda._lazy_call(operators.poison_blocks)


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            _install()

        vars(spec.loader)["exec_module"] = execute_and_install
        return spec


if "FAKE_CUDA_FOLDER" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
