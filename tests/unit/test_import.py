"""What ``import fsdp_c`` loads, in a fresh interpreter."""

import subprocess
import sys

import pytest

import fsdp_c
import fsdp_c.tools.plan

PROGRAM = """
import sys
import torch, torch.distributed.fsdp
before = set(sys.modules)
import fsdp_c
print(*(set(sys.modules) - before))
from fsdp_c import *
assert {*fsdp_c.__all__} <= {*dir()}
assert {*fsdp_c.__all__} <= {*dir(fsdp_c)}
for name in torch.distributed.fsdp.__all__: getattr(fsdp_c, name)
import fsdp_c.checkpoint, fsdp_c.integrations
import fsdp_c.tools.doctor, fsdp_c.tools.plan, fsdp_c.tools.trace
import importlib, os
from fsdp_c._engines.engine import engine_listeners
others = len(engine_listeners)
os.environ["FSDP_C_TRACE"] = "folder"
importlib.reload(fsdp_c)
assert len(engine_listeners) == others + 1
"""


def test_what_is_loaded_and_found() -> None:
    """What training does not need is not loaded; public names, torch's too, are found.

    FSDP_C_TRACE alone waits for models to record.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "fsdp_c._fsdp1.sharded_module" in loaded
    rooms = ("fsdp_c.checkpoint", "fsdp_c.tools")
    unneeded = {each for each in loaded if each.startswith(rooms)}
    unneeded |= loaded & {"matplotlib", "numpy", "rich", "torch.distributed.optim"}
    assert not unneeded


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trase'"):
        fsdp_c.trase  # noqa: B018
