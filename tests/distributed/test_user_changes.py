"""What users change between steps: gradients' data, and what is trainable."""

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

from helpers.distributed import distributed
from helpers.impl import FSDP, fsdp
from helpers.models import DIM, Block
from helpers.reference import Differential
from helpers.seeds import seeded


def _same(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    with FSDP.summon_full_params(model):
        for mine, expected in zip(
            model.parameters(), reference.parameters(), strict=True
        ):
            torch.testing.assert_close(mine, expected)


@distributed(world_size=2)
def test_frozen_after_wrapping_has_no_gradient() -> None:
    """So that weight decay leaves it alone."""
    reference = Block()
    model = fsdp(copy.deepcopy(reference), use_orig_params=True)
    x = torch.randn(4, 6, generator=seeded(0))
    for module in (model, reference):
        for name, param in module.named_parameters():
            if "bias" in name:
                param.requires_grad_(False)
        optimizer = torch.optim.AdamW(module.parameters(), 0.1, weight_decay=0.5)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            module(x).square().mean().backward()
            optimizer.step()
    _same(model, reference)


class _Listener(nn.Linear):
    """Counts the parameters that are set on it, and sees them whole."""

    def __init__(self, *args: Any) -> None:
        self.__dict__["shapes"] = []
        super().__init__(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.__dict__["shapes"].append((name, tuple(value.shape)))
        super().__setattr__(name, value)


@pytest.mark.parametrize("unsafe", ["", "0", "1"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_a_setattr_of_the_modules_own_is_called(
    use_orig_params: bool, unsafe: str
) -> None:
    """In every forward, unless FSDP_USE_UNSAFE_SETATTR=1; training is the same."""
    before = os.environ.get("FSDP_USE_UNSAFE_SETATTR")
    os.environ["FSDP_USE_UNSAFE_SETATTR"] = unsafe
    try:
        differential = Differential.of_units(
            lambda: nn.Sequential(nn.Linear(DIM, DIM), _Listener(DIM, 3)),
            {_Listener},
            use_orig_params=use_orig_params,
        )
        listener = differential.model.module[1].module
        for _ in range(2):
            listener.__dict__["shapes"] = []
            differential.zero_grad()
            differential.forward_backward()
            expected = (
                set() if unsafe == "1" else {("weight", (3, DIM)), ("bias", (3,))}
            )
            assert set(listener.shapes) >= expected
            assert bool(listener.shapes) == bool(expected)
            differential.checked_step()
    finally:
        del os.environ["FSDP_USE_UNSAFE_SETATTR"]
        if before is not None:
            os.environ["FSDP_USE_UNSAFE_SETATTR"] = before
