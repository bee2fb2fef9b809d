"""Code written for torch's FSDP1 runs with one changed import line.

The code is torch's own: `torch/testing/_internal/common_fsdp.py` of the installed
torch, which builds, wraps and feeds the models of torch's FSDP tests.
"""

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_c
from helpers.distributed import distributed

pytestmark = pytest.mark.bookkeeping

THEIRS = "    FullyShardedDataParallel as FSDP,\n"
OURS = "from fsdp_c import FullyShardedDataParallel as FSDP\n"


def _changed(original: types.ModuleType) -> types.ModuleType:
    """Return torch's module, executed anew with one import line changed."""
    assert original.__file__ is not None
    path = Path(original.__file__)
    lines = path.read_text().splitlines(keepends=True)
    assert lines.count(THEIRS) == 1
    end = lines.index(")\n", lines.index(THEIRS))
    lines.insert(end + 1, OURS)
    lines.remove(THEIRS)
    module = types.ModuleType("common_fsdp_changed")
    module.__file__ = str(path)
    exec(compile("".join(lines), str(path), "exec", dont_inherit=True), vars(module))
    return module


def _train(code: Any, model_class: str, options: dict[str, Any]) -> list[Tensor]:
    """Train a model of ``code`` for 4 steps; return losses and gradient norms."""
    group = dist.group.WORLD
    model = getattr(code, model_class).init(
        group,
        code.FSDPInitMode.RECURSIVE,
        code.DEVICEInitMode.DEVICE_NEVER,
        fsdp_kwargs={"device_id": torch.device("cpu"), **options},
        deterministic=True,
    )
    if not isinstance(model, code.FSDP):
        model = code.FSDP(model, group, device_id=torch.device("cpu"), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    log = []
    for _ in range(4):
        batch = model.module.get_input(torch.device("cpu"))
        loss = model.module.get_loss(batch, model(*batch))
        model.module.run_backward(loss)
        log += [loss.detach(), model.clip_grad_norm_(1.0)]
        optimizer.step()
        optimizer.zero_grad()
    return log


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(
    "model_class", ["TransformerWithSharedParams", "NestedWrappedModule"]
)
@distributed(world_size=2, device="cpu", timeout_s=240)
def test_torch_s_models(model_class: str, use_orig_params: bool) -> None:
    import torch.testing._internal.common_fsdp as original  # and much of torch

    changed = _changed(original)
    assert changed.FSDP is fsdp_c.FullyShardedDataParallel
    options = {"use_orig_params": use_orig_params}
    actual = _train(changed, model_class, options)
    expected = _train(original, model_class, options)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-6)
