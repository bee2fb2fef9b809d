"""Runs when a Python process starts under ``python -m fsdp_c launch``.

Python imports the first sitecustomize on its path at every start. This one arranges
for fsdp_c to be installed when torch's FSDP, accelerate, peft or the Trainer is
imported, and then runs the sitecustomize that would have been first without it.
Processes that import none of these import neither torch nor fsdp_c.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parent
# fsdp_c/integrations, and the folder that fsdp_c is in.
_INTEGRATIONS = _FOLDER.parents[0]
_ROOT = _FOLDER.parents[2]

# Before these run: they, or what they import, are changed while installed.
_BEFORE = (
    "accelerate",
    "peft",
    "transformers.trainer",
    "transformers.trainer_seq2seq",
    "transformers.training_args",
)
# After this: fsdp_c needs it.
_AFTER = ("torch.distributed.fsdp",)


def _install(_: ModuleType) -> None:
    """Install fsdp_c, from this installation or from where this file is.

    Raises:
        RuntimeError: It cannot be imported. Not an ImportError: those that try
            whether accelerate is there would go on without fsdp_c.
    """
    try:
        if importlib.util.find_spec("fsdp_c") is None:
            sys.path.append(str(_ROOT))
        from fsdp_c.integrations import install  # noqa: PLC0415

        install()
    except ImportError as error:
        raise RuntimeError(
            "python -m fsdp_c launch: fsdp_c cannot be imported in this process "
            f"({sys.executable}): {error}"
        ) from error


def _watch_imports() -> None:
    name = "_fsdp_c_import_hook"
    path = _INTEGRATIONS / "_import_hook.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ImportHook(
        before=dict.fromkeys(_BEFORE, _install), after=dict.fromkeys(_AFTER, _install)
    ).add()


def _run_next() -> None:
    """Run the sitecustomize that this one hides."""
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if os.environ.get("FSDP_C_INSTALL") == "1":
        _watch_imports()
    _run_next()
