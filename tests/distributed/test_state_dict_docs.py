"""The examples in docs/state_dicts.md run, and do what they say."""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers.distributed import distributed
from helpers.impl import needs_fsdp_c
from helpers.reference import assert_same_tensors, full_state_dict
from helpers.state_dicts import everything

PAGE = Path(__file__).resolve().parents[2] / "docs" / "state_dicts.md"


@distributed(world_size=2)
def test_examples(rank: int, world_size: int) -> None:
    """The second loads what the first saved; the others do both."""
    needs_fsdp_c("is not what they are about")
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 4
    reference, model = everything()
    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folders)
    names: dict[str, Any] = {
        "model": model,
        "torch": torch,
        "rank": rank,
        "folder": folders[0],
    }
    try:
        for index, example in enumerate(examples):
            if index == 1:  # loads what the one before it saved
                with torch.no_grad():
                    for param in model.parameters():
                        param.zero_()
            exec(example, names)
            state = full_state_dict(model)
            assert_same_tensors("state", state, reference.state_dict(), 0.0)
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folders[0])
        names.clear()
