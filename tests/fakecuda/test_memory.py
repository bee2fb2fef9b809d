"""Memory of blocks on a device: it is the user's, and there when it is needed."""

import itertools

import pytest
import torch
from torch import nn

from fakecuda.device import needs_cuda, needs_fake, set_memory
from helpers.distributed import distributed
from helpers.impl import fsdp

pytestmark = needs_cuda

# From 10 MiB on, torch's allocator gives each block a segment, of whole 2 MiB.
DIMS = (2048, 2048, 2560, 3072, 4096)


def growing_model() -> nn.Module:
    """Return units of several sizes."""
    torch.manual_seed(0)
    layers = [
        fsdp(nn.Linear(a, b, bias=False), use_orig_params=True)
        for a, b in itertools.pairwise(DIMS)
    ]
    return fsdp(nn.Sequential(*layers), use_orig_params=True)


def train(model: nn.Module, num_steps: int) -> None:
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, DIMS[0], generator=generator, device="cpu").to("cuda")
        model(x).square().mean().backward()
        model.zero_grad()


def reserved_nbytes() -> int:
    """Return what the allocator has taken from the device."""
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved()


@needs_fake
@distributed(world_size=2, device="cuda")
def test_blocks_and_tensors_are_made_of_the_same_memory() -> None:
    """What a block leaves the user's tensors can have, and the other way round."""
    torch.cuda.empty_cache()
    model = growing_model()
    train(model, 2)
    held = reserved_nbytes()
    tensor = torch.zeros(DIMS[-2] * DIMS[-1], device="cuda")
    assert reserved_nbytes() == held
    del tensor
    train(model, 2)
    assert reserved_nbytes() == held
    # A device without more memory than that.
    set_memory(held)
    try:
        train(model, 2)
    finally:
        set_memory(0)


@pytest.mark.parametrize("by_rows", [False, True])
@distributed(world_size=2, device="cuda")
def test_what_only_backward_needs_is_not_there_in_forward(by_rows: bool) -> None:
    """At the end of forward there are the outermost unit's parameters alone."""
    from fsdp_c import fully_shard, memory_stats

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 64))
    if by_rows:
        for layer in model[:2]:
            fully_shard(layer)
        fully_shard(model)
    else:
        for index in range(2):
            model[index] = fsdp(model[index], use_orig_params=True)
        model = fsdp(model, use_orig_params=True)
    x = torch.randn(4, 64)
    for _ in range(3):
        loss = model(x).square().mean()
        stats = memory_stats(model)
        assert 4 * 65 * 64 <= stats["arena_nbytes"] < 4 * 65 * 64 + 2048
        assert stats["num_blocks"] == 1
        loss.backward()
        assert memory_stats(model)["arena_nbytes"] == 0
        model.zero_grad()
