"""What users change between steps: gradients' data, and what is trainable."""

import copy

import pytest
import torch

from helpers.distributed import distributed
from helpers.impl import FSDP, fsdp, needs_fsdp_c
from helpers.models import Block


def _same(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    with FSDP.summon_full_params(model):
        for mine, expected in zip(
            model.parameters(), reference.parameters(), strict=True
        ):
            torch.testing.assert_close(mine, expected)


@pytest.mark.trap(18)
@distributed(world_size=2)
def test_replaced_data_of_a_gradient_is_used(rank: int, world_size: int) -> None:
    """`param.grad.data = x`, and a backward that adds to it."""
    reference = Block()
    model = fsdp(copy.deepcopy(reference), use_orig_params=True)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference)]
    for module in (model, reference):
        module(x).square().mean().backward()
        for param in module.parameters():
            if param.grad is not None:
                param.grad.data = torch.full_like(param, 2.0)
        module(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    _same(model, reference)


@distributed(world_size=2)
def test_frozen_after_wrapping_has_no_gradient(rank: int, world_size: int) -> None:
    """So that weight decay leaves it alone."""
    needs_fsdp_c("its flat parameter shows zeros instead of none in some cases")
    reference = Block()
    model = fsdp(copy.deepcopy(reference), use_orig_params=True)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
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
