"""Memory of blocks: what the arena leaves is given back, and what is idle can go."""

import itertools

import torch
from torch import nn

from helpers.accelerator import ACCELERATOR, native, needs_exact_memory
from helpers.distributed import distributed
from helpers.impl import FSDP, fsdp

DIMS = (64, 96, 128, 192, 256)


def growing_model() -> nn.Module:
    """Units that grow, so that the first step's blocks are too small in turn."""
    torch.manual_seed(0)
    layers = [
        fsdp(nn.Linear(a, b), use_orig_params=True) for a, b in itertools.pairwise(DIMS)
    ]
    return fsdp(nn.Sequential(*layers), use_orig_params=True)


def train(model: nn.Module, num_steps: int) -> None:
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, DIMS[0], generator=generator, device="cpu").to(ACCELERATOR)
        model(x).square().mean().backward()
        model.zero_grad()


def cached_nbytes() -> int:
    """Return what the allocator keeps and nobody uses."""
    native().synchronize()
    stats = native().memory_stats()
    return int(stats["held_nbytes"] - stats["live_nbytes"])


@needs_exact_memory
@distributed(world_size=2, device=ACCELERATOR)
def test_what_a_plan_leaves_is_given_back() -> None:
    from fsdp_c import memory_stats

    native().empty_cache()
    model = growing_model()
    train(model, 1)
    stats = memory_stats(model)
    assert stats["num_frees"] > 0
    # What step 1 used and the plan did not take would be cached for the blocks'
    # stream, of no use to the user's tensors: a tenth of what the arena holds.
    assert cached_nbytes() < stats["arena_nbytes"] // 20


@needs_exact_memory
@distributed(world_size=2, device=ACCELERATOR)
def test_idle_blocks_go_before_memory_runs_out() -> None:
    from fsdp_c import memory_stats

    native().empty_cache()
    model = growing_model()
    train(model, 3)
    expected = [param.detach().clone() for param in model.parameters()]
    arena = memory_stats(model)["arena_nbytes"]
    native().empty_cache()
    held = native().memory_stats()["held_nbytes"]
    largest = 4 * (DIMS[-2] + 1) * DIMS[-1]
    assert largest < arena
    # The parameters of all units at once do not fit beside the idle blocks.
    native().set_memory_limit(held + largest)
    try:
        with FSDP.summon_full_params(model):
            whole = sum(param.numel() for param in model.parameters())
        assert 4 * whole > largest
        assert memory_stats(model)["arena_nbytes"] == 0
    finally:
        native().set_memory_limit(0)
    for param, before in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.detach(), before)
    train(model, 2)
    assert memory_stats(model)["arena_nbytes"] == arena
