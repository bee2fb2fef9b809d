"""What `capture_step` refuses without a GPU; on one: tests/fakecuda, tests/cuda."""

import pytest
import torch
from torch import nn

import fsdp_c
from fsdp_c import _native
from helpers.distributed import distributed
from helpers.impl import fsdp


@distributed(world_size=2, device="cpu")
def test_the_cpu_is_refused() -> None:
    model = fsdp(nn.Linear(8, 8), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    match = "on the CPU cannot be captured.*train on a CUDA device"
    with pytest.raises(RuntimeError, match=match):
        fsdp_c.capture_step(model, model, optimizer)
    model(torch.randn(2, 8)).sum().backward()  # it is usable


@distributed(world_size=2)
def test_stages_that_do_not_exist() -> None:
    model = fsdp(nn.Linear(8, 8))
    model(torch.randn(2, 8)).sum().backward()
    for stage in (_native.BEGIN_CAPTURE - 1, _native.END_REPLAY + 1):
        with pytest.raises(ValueError, match=f"END_REPLAY, got {stage}"):
            model._engine.run_capture_stage(stage)
