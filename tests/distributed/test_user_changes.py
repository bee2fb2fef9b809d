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


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_kept_gradients_stay_what_they_were(use_orig_params: bool) -> None:
    """After zero_grad() and another step; views that nobody keeps are used again."""
    model = fsdp(Block(), use_orig_params=use_orig_params)
    x = torch.randn(4, 6, generator=seeded(0))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(4):
        model(x * (step + 1)).square().mean().backward()
        if step % 2 == 0:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            kept += [(grad, grad.clone()) for grad in grads]
            del grads
        model.zero_grad()
    assert len(kept) > 0
    for grad, value in kept:
        assert torch.equal(grad, value)
        assert value.any()


@pytest.mark.skipif(
    torch.__version__.startswith("2.11"),
    reason="torch 2.11 cannot refuse to read freed memory: it crashes",
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=2)
def test_a_view_kept_from_forward_cannot_be_read(strategy: str) -> None:
    """Its memory belongs to other units then: an error says so."""
    model = fsdp(
        nn.Sequential(Block(), Block()),
        units={Block},
        strategy=strategy,
        use_orig_params=True,
    )
    kept: list[torch.Tensor] = []
    model.module[0].module.fc1.register_forward_pre_hook(
        lambda module, args: kept.append(module.weight.detach())
    )
    model(torch.ones(2, DIM)).sum().backward()
    assert kept[0].shape == (10, DIM)
    with pytest.raises(RuntimeError, match="unit '0' is sharded now"):
        kept[0].sum()
