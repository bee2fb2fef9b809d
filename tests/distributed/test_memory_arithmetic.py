"""What benchmarks/memory.py computes for fsdp_c, against what the engine reports.

The arithmetic counts shards, gradient shards and blocks. Only the gradients that wait
to be packed are autograd's.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.distributed import distributed
from helpers.impl import fsdp
from helpers.transports import c10d_only, num_scratches

pytestmark = pytest.mark.cpu_only("benchmarks/memory.py is about CPU ranks' padding")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _import_benchmarks() -> tuple[Any, Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import implementations
        import memory_arithmetic
    finally:
        sys.path.remove(str(BENCHMARKS))
    return implementations, memory_arithmetic


def _grad_nbytes(model: Any) -> int:
    import fsdp_c

    return fsdp_c.memory_stats(model)["grad_shard_nbytes"]


def _train(
    implementations: Any, module: Any, accumulation: str | None
) -> tuple[Any, dict[str, int]]:
    """Train ``module``; return the model and what its engine holds at the end."""
    import fsdp_c

    model = fsdp(module, units={implementations.Block}, use_orig_params=True)
    tokens = torch.arange(8).view(1, 8)
    options = {"sharded": True} if accumulation == "sharded" else {}
    for _ in range(3):
        model.zero_grad()
        if accumulation is not None:
            with model.no_sync(**options):
                model(tokens, tokens).backward()
        model(tokens, tokens).backward()
    return model, fsdp_c.memory_stats(model)


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("accumulation", [None, "unsharded", "sharded"])
@distributed(world_size=(2, 3))
def test_arithmetic(
    world_size: int, accumulation: str | None, shares_memory: bool
) -> None:
    """Of a GPT, without and with no_sync, over both transports."""
    implementations, arithmetic = _import_benchmarks()
    torch.manual_seed(0)
    module = implementations.GPT(20, 4, 2)
    expected = arithmetic.FsdpC.of(
        module, world_size, gloo=not shares_memory, accumulation=accumulation
    )
    with nullcontext() if shares_memory else c10d_only():
        _, stats = _train(implementations, module, accumulation)
        assert (num_scratches() == 0) == shares_memory
    assert stats["shard_nbytes"] == expected.shards
    assert stats["grad_shard_nbytes"] == expected.gradients
    assert stats["arena_nbytes"] == expected.arena
    assert stats["scratch_nbytes"] == expected.scratch
    assert stats["partial_grad_nbytes"] == expected.partial


@distributed(world_size=2)
def test_gradients_at_the_busiest_moment(world_size: int) -> None:
    """All units but the root are reduced when the root's last gradient comes."""
    implementations, arithmetic = _import_benchmarks()
    torch.manual_seed(0)
    module = implementations.GPT(20, 4, 2)
    expected = arithmetic.FsdpC.of(module, world_size, gloo=True, accumulation=None)
    root = arithmetic._Units.of(module).root
    # Below the threshold nothing of the root is packed before its end.
    waiting = sum(param.numel() * 4 for param in root)
    root_shard = arithmetic._flat_nbytes(root, world_size) // world_size
    assert expected.busiest == (expected.gradients - root_shard, waiting)

    model, stats = _train(implementations, module, None)
    assert stats["grad_shard_nbytes"] == expected.gradients
    seen = []
    embedded: list[torch.Tensor] = []
    handle = model.module.embedding.register_forward_hook(
        lambda *args: embedded.append(args[-1])
    )
    model.zero_grad()
    tokens = torch.arange(8).view(1, 8)
    loss = model(tokens, tokens)
    handle.remove()
    # Runs after backward has left the blocks.
    embedded.pop().register_hook(lambda _: seen.append(_grad_nbytes(model)))
    loss.backward()
    assert seen == [expected.busiest[0]]
