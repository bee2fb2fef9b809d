"""The examples in docs/checkpoint.md run, one after the other."""

import copy
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers.distributed import distributed
from helpers.impl import fsdp
from helpers.models import MLP
from helpers.reference import assert_same_tensors, full_state_dict

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoint.md"


@distributed(world_size=2)
def test_examples(rank: int, world_size: int, tmp_path: Path) -> None:
    """The second loads what the first saved, the last what the third did."""
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 4
    model = fsdp(MLP())
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).sum().backward()
    optim.step()
    names: dict[str, Any] = {
        "model": model,
        "optim": optim,
        "scheduler": torch.optim.lr_scheduler.StepLR(optim, 1),
        "torch": torch,
        "rank": rank,
        "folder": str(tmp_path),
    }
    expected = copy.deepcopy(full_state_dict(model))
    for index, example in enumerate(examples):
        if index in (1, 3):
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
        exec(example, names)
        assert_same_tensors("state", full_state_dict(model), expected, 0.0)
        dist.barrier()
    assert names["step"] == 5
    names.clear()
