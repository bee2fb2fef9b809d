"""offload_activations(): its arguments, and the CPU, where it does nothing."""

import pytest
import torch
from torch import nn

import fsdp_c
from helpers.distributed import distributed
from helpers.impl import fsdp
from helpers.models import Block, loss_of, vectors
from helpers.seeds import generator


@pytest.mark.cpu_only("nothing happens there")
@distributed(world_size=2)
def test_nothing_happens_on_a_cpu(rank: int) -> None:
    model = fsdp(nn.Sequential(Block(), Block(), Block()), units={Block})
    fsdp_c.offload_activations(model, min_bytes=1)
    (x,) = vectors(generator(rank))
    loss_of(model(x)).backward()
    stats = fsdp_c.memory_stats(model)
    assert stats["num_downloads"] == stats["pinned_nbytes"] == 0


@pytest.mark.bookkeeping
@distributed(world_size=2)
def test_bad_arguments() -> None:
    model = fsdp(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="min_bytes must be at least 1, got 0"):
        fsdp_c.offload_activations(model, min_bytes=0)
    with pytest.raises(ValueError, match="keep_last must be at least 1, got -1"):
        fsdp_c.offload_activations(model, keep_last=-1)
    with pytest.raises(ValueError, match="no FullyShardedDataParallel module"):
        fsdp_c.offload_activations(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model must be a module"):
        fsdp_c.offload_activations(torch.ones(1))  # type: ignore[arg-type]
    unit = model._sharded.unit
    with pytest.raises(ValueError, match="keep_last at least 1, got 1 and 0"):
        unit.offload_activations(1, 0)
