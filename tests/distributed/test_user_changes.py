"""What users change between steps: gradients' data, and what is trainable."""

from typing import Any

import pytest
import torch
from torch import nn

from helpers.distributed import distributed
from helpers.models import DIM, Block
from helpers.reference import Differential


@distributed(world_size=2)
def test_frozen_after_wrapping_has_no_gradient() -> None:
    """So that weight decay leaves it alone."""
    both = Differential.of_units(
        Block,
        (),
        optimizer=lambda params: torch.optim.AdamW(params, 0.1, weight_decay=0.5),
        tolerance=1e-3,
    )
    for module in (both.model, both.reference):
        for name, param in module.named_parameters():
            if "bias" in name:
                param.requires_grad_(False)
    for _ in range(2):
        both.zero_grad(set_to_none=False)
        both.forward_backward()
        both.checked_step()


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
    use_orig_params: bool, unsafe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every forward, unless FSDP_USE_UNSAFE_SETATTR=1; training is the same."""
    monkeypatch.setenv("FSDP_USE_UNSAFE_SETATTR", unsafe)
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
        expected = set() if unsafe == "1" else {("weight", (3, DIM)), ("bias", (3,))}
        assert set(listener.shapes) >= expected
        assert bool(listener.shapes) == bool(expected)
        differential.checked_step()
