"""Sharded models where torch's streams, allocators and graphs have a say."""

import copy

import torch
from torch import nn

from fakecuda.device import needs_fake, set_schedule
from helpers.distributed import distributed
from helpers.impl import FSDP, fsdp
from helpers.programs import run_fresh

pytestmark = needs_fake

DIM = 8
NUM_ROOTS = 12
TOLERANCE = 1e-5


@distributed(world_size=2, device="cuda")
def test_more_engines_than_torch_has_streams(rank: int) -> None:
    """Each root has an engine; their lanes are more than the 32 streams of torch."""
    for seed in range(4):
        set_schedule(seed, 1.0)
        layers = [nn.Linear(DIM, DIM) for _ in range(NUM_ROOTS)]
        reference = nn.Sequential(*copy.deepcopy(layers))
        model = nn.Sequential(*(fsdp(layer, use_orig_params=True) for layer in layers))
        whole = torch.randn(4, DIM)
        model(whole[2 * rank :][:2]).square().mean().backward()
        reference(whole).square().mean().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            for mine, theirs in zip(
                model.parameters(), reference.parameters(), strict=True
            ):
                torch.testing.assert_close(mine, theirs)
                torch.testing.assert_close(mine.grad, theirs.grad)


def test_an_allocator_in_the_order_of_streams() -> None:
    """Its memory is there from its turn in the stream on, not at once."""
    said = run_fresh(
        "fakecuda.programs",
        "train",
        PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync",
    )
    error, backend = said.split()
    assert backend == "cudaMallocAsync"
    assert float(error) < TOLERANCE
