"""install(), uninstall(), installed(): what changes, and that all of it goes back."""

import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed.checkpoint.state_dict as dcp_state_dict
import torch.distributed.fsdp as torch_package
from torch.distributed.fsdp import fully_sharded_data_parallel as torch_module

import fsdp_c
from fsdp_c.integrations import huggingface
from fsdp_c.integrations._import_hook import ImportHook
from fsdp_c.integrations._patch import Patch
from fsdp_c.integrations._swap import PATCHES
from helpers.programs import run_fresh

ROOT = Path(__file__).resolve().parents[2]
TORCH_CLASS = torch_module.FullyShardedDataParallel
TORCH_MODULE = torch_package.FSDPModule


@pytest.fixture(autouse=True)
def _not_installed() -> Iterator[None]:
    assert not huggingface.is_installed()
    yield
    huggingface.uninstall()
    assert torch_module.FullyShardedDataParallel is TORCH_CLASS


def _bindings() -> dict[tuple[str, str], int]:
    """Return everything that the modules of the libraries hold, and their classes."""
    found = {}
    for name, module in list(sys.modules.items()):
        root = name.partition(".")[0]
        if root not in {"torch", "accelerate", "transformers", "peft", "fsdp_c"}:
            continue
        if not isinstance(module, ModuleType):
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = id(value)
    for patch in PATCHES:
        owner, _, method = patch.function.rpartition(".")
        if owner:
            cls = getattr(sys.modules[patch.module], owner)
            found[patch.module, patch.function] = id(vars(cls)[method])
    return found


def test_everything_goes_back() -> None:
    pytest.importorskip("transformers")
    for patch in PATCHES:
        importlib.import_module(patch.module)
    for name in ("transformers.trainer_seq2seq", "torch.distributed.pipelining"):
        importlib.import_module(name)
    torch_id = id(TORCH_CLASS)  # that name changes, too
    before = _bindings()
    with warnings.catch_warnings():
        warnings.simplefilter("error", huggingface.IntegrationWarning)
        huggingface.install()  # every function is as expected in these versions
    during = _bindings()
    changed = {key for key in before if during.get(key) != before[key]}
    classes = {key for key in changed if before[key] == torch_id}
    assert {
        ("torch.distributed.fsdp", "FullyShardedDataParallel"),
        (torch_module.__name__, "FullyShardedDataParallel"),
        ("transformers.trainer_seq2seq", "FullyShardedDataParallel"),
    } <= classes
    assert (dcp_state_dict.__name__, "FSDP") in classes
    assert {
        ("torch.distributed.fsdp", "fully_shard"),
        ("torch.distributed.fsdp", "register_fsdp_forward_method"),
        ("torch.distributed.fsdp", "share_comm_ctx"),
        ("torch.distributed._composable.fsdp", "fully_shard"),
        ("torch.distributed.pipelining.stage", "fully_shard"),
        ("transformers.distributed.fsdp", "fully_shard"),
    } <= changed
    assert {(patch.module, patch.function) for patch in PATCHES} <= changed
    # Those that hold a patched function by name have the new one.
    assert ("accelerate.accelerator", "load_fsdp_optimizer") in changed
    assert ("transformers.trainer", "load_fsdp_optimizer") in changed
    huggingface.uninstall()
    after = _bindings()
    assert {key: after.get(key) for key in before} == before
    left = {
        value for (name, _), value in after.items() if not name.startswith("fsdp_c")
    }
    assert not left & {id(fsdp_c.FSDP), id(fsdp_c.fully_shard)}


def _imports_when_called() -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard


def test_fully_shard() -> None:
    torch_function = _imports_when_called()
    assert torch_function is not fsdp_c.fully_shard
    with huggingface.installed():
        assert _imports_when_called() is fsdp_c.fully_shard
        assert torch_package.FSDPModule is TORCH_MODULE  # a base of fsdp_c's
    assert _imports_when_called() is torch_function


def test_repeated_and_nested() -> None:
    with huggingface.installed():
        with huggingface.installed():
            assert torch_package.FullyShardedDataParallel is fsdp_c.FSDP
        assert torch_package.FullyShardedDataParallel is fsdp_c.FSDP
        huggingface.install()
        assert huggingface.is_installed()
    assert torch_package.FullyShardedDataParallel is TORCH_CLASS
    huggingface.install()
    huggingface.install()
    huggingface.uninstall()
    assert torch_package.FullyShardedDataParallel is TORCH_CLASS
    huggingface.uninstall()


def test_modules_imported_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that meant torch's class get it; those that meant fsdp_c's keep that."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "hf_meanwhile"
    package.mkdir()
    name = "FullyShardedDataParallel"
    sources = {
        "__init__": "",
        "meant_torch": f"from torch.distributed.fsdp import {name} as FSDP\n",
        "meant_ours": "from fsdp_c import FSDP\n",
        "from_torch": "from .meant_torch import FSDP as Renamed\n",
        "from_ours": "from .meant_ours import *\n",
    }
    for module, source in sources.items():
        (package / f"{module}.py").write_text(source)
    with huggingface.installed():
        modules = {
            module: importlib.import_module(f"hf_meanwhile.{module}")
            for module in sources
        }
        anonymous = ModuleType("hf_without_source")
        vars(anonymous)["FSDP"] = torch_package.FullyShardedDataParallel
        monkeypatch.setitem(sys.modules, anonymous.__name__, anonymous)
        assert modules["meant_torch"].FSDP is fsdp_c.FSDP
    try:
        assert modules["meant_torch"].FSDP is TORCH_CLASS
        assert modules["from_torch"].Renamed is TORCH_CLASS
        assert modules["meant_ours"].FSDP is fsdp_c.FSDP
        assert modules["from_ours"].FSDP is fsdp_c.FSDP
        assert anonymous.FSDP is TORCH_CLASS
    finally:
        for module in [key for key in sys.modules if key.startswith("hf_meanwhile")]:
            del sys.modules[module]


def test_who_had_fsdp_c_before_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("hf_script")
    vars(script)["FSDP"] = fsdp_c.FSDP
    monkeypatch.setitem(sys.modules, "hf_script", script)
    with huggingface.installed():
        pass
    assert script.FSDP is fsdp_c.FSDP


def test_without_the_libraries() -> None:
    """The module imports, torch's names are exchanged, nothing else is imported."""
    run_fresh("helpers.without_libraries")


# The machinery, with modules made here ---------------------------------------


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``hf_fake`` that is not imported yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hf_fake.py").write_text(
        "def load(path, strict=True):\n    return ('read', path, strict)\n"
        "class State:\n    def __init__(self, kind):\n        self.kind = kind\n"
    )
    (tmp_path / "hf_user.py").write_text("from hf_fake import load as fetch\n")
    yield tmp_path
    for name in ("hf_fake", "hf_user"):
        sys.modules.pop(name, None)


def _patch(**changes: object) -> Patch:
    fields = {
        "module": "hf_fake",
        "function": "load",
        "purpose": "loading",
        "parameters": "path",
        "mentions": "read",
        "wrap": lambda original: lambda *args, **kwargs: "new",
    }
    return Patch(**{**fields, **changes})  # type: ignore[arg-type]


def test_hook_calls_before_and_after(library: Path) -> None:
    calls = []
    hook = ImportHook(
        before={"hf_fake": lambda module: calls.append(hasattr(module, "load"))},
        after={"hf_fake": lambda module: calls.append(hasattr(module, "load"))},
    )
    other = ImportHook(after={"hf_fake": lambda module: calls.append(True)})
    hook.add()
    other.add()
    hook.add()
    try:
        assert importlib.util.find_spec("hf_fake") is not None
        assert calls == []  # looking for it is not importing it
        module = importlib.import_module("hf_fake")
    finally:
        hook.remove()
        other.remove()
    assert calls == [False, True, True]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__.loader is module.__loader__
    assert not [each for each in sys.meta_path if isinstance(each, ImportHook)]


def test_patch_and_undo(library: Path) -> None:
    module = importlib.import_module("hf_fake")
    user = importlib.import_module("hf_user")
    original = module.load
    applied = _patch().apply(module)
    assert applied is not None
    kept = module.load
    assert user.fetch is module.load
    assert module.load("x") == "new"
    applied.undo()
    assert module.load is original
    assert user.fetch is original
    assert kept("x") == ("read", "x", True)  # also for those who stored it


def test_patch_under_another_one(library: Path) -> None:
    """Somebody wraps the patched method: it stays, and undone the patch is gone."""
    state = importlib.import_module("hf_fake").State

    def init(self: object, kind: str) -> None:
        vars(self)["kind"] = f"patched {kind}"

    patch = _patch(
        function="State.__init__",
        parameters="kind",
        mentions="kind",
        wrap=lambda original: init,
    )
    applied = patch.apply(sys.modules["hf_fake"])
    assert applied is not None
    inner = state.__init__
    state.__init__ = lambda self, kind: inner(self, kind.upper())
    assert state("x").kind == "patched X"
    applied.undo()
    assert state("x").kind == "X"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"function": "absent"}, "is not a function"),
        ({"function": "Absent.f"}, "is not a function"),
        ({"parameters": "path device"}, "no parameter device"),
        ({"mentions": "read write"}, "does not mention write any"),
    ],
)
def test_unknown_function_is_left_alone(
    library: Path, changes: dict[str, object], problem: str
) -> None:
    module = importlib.import_module("hf_fake")
    original = module.load
    with pytest.warns(huggingface.IntegrationWarning, match=problem) as caught:
        assert _patch(**changes).apply(module) is None
    assert "this change is missing: loading" in str(caught[0].message)
    assert module.load is original
