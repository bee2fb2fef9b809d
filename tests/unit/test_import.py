"""What ``import fsdp_c`` loads, in a fresh interpreter."""

import subprocess
import sys

import pytest

import fsdp_c
import fsdp_c.plan

LOADED = """
import sys
import torch, torch.distributed.fsdp
before = set(sys.modules)
import fsdp_c
print(*(set(sys.modules) - before))
"""


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_what_training_does_not_need_is_not_loaded() -> None:
    loaded = set(_run(LOADED).split())
    assert "fsdp_c._module.sharded_module" in loaded
    rooms = ("checkpoint", "doctor", "plan", "trace")
    unneeded = {
        each
        for each in loaded
        if each.startswith(tuple(f"fsdp_c.{room}" for room in rooms))
    }
    unneeded |= loaded & {"matplotlib", "numpy", "rich", "torch.distributed.optim"}
    assert not unneeded


def test_every_public_name_is_found() -> None:
    modules = ("checkpoint", "doctor", "integrations", "plan", "trace")
    code = "from fsdp_c import *\nimport fsdp_c\nassert {*fsdp_c.__all__} <= {*dir()}\n"
    code += "assert {*fsdp_c.__all__} <= {*dir(fsdp_c)}\n"
    code += "".join(f"import fsdp_c.{each}\n" for each in modules)
    _run(code)


@pytest.mark.parametrize("kind", ["Model", "Unit"])
def test_the_names_that_explain_had(kind: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"use fsdp_c.{kind}Summary"):
        old = getattr(fsdp_c, f"{kind}Plan")
    assert old is getattr(fsdp_c, f"{kind}Summary")
    assert old is not getattr(fsdp_c.plan, f"{kind}Plan")


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trase'"):
        fsdp_c.trase  # noqa: B018
