"""What benchmarks/memory.py computes for fsdp_c, against what the engine reports.

The arithmetic counts shards, gradient shards and blocks; only the gradients that wait
to be packed are not the engine's.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers.distributed import distributed
from helpers.impl import IS_TORCH, fsdp, needs_fsdp_c

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _import_benchmarks() -> tuple[Any, Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import implementations
        import memory_arithmetic
    finally:
        sys.path.remove(str(BENCHMARKS))
    return implementations, memory_arithmetic


def _engine_nbytes(model: Any) -> int:
    needs_fsdp_c("has no memory_stats")
    if IS_TORCH:
        return 0
    import fsdp_c

    stats = fsdp_c.memory_stats(model)
    return sum(stats[f"{key}_nbytes"] for key in ("shard", "grad_shard", "arena"))


@pytest.mark.parametrize("accumulation", [None, "unsharded"])
@distributed(world_size=(2, 3))
def test_arithmetic(rank: int, world_size: int, accumulation: str | None) -> None:
    """Of a GPT, without and with no_sync."""
    needs_fsdp_c("has no memory_stats")
    implementations, arithmetic = _import_benchmarks()
    torch.manual_seed(0)
    module = implementations.GPT(20, 4, 2)
    units = arithmetic._Units.of(module)
    expected = arithmetic.fsdp_c(
        module, world_size, gloo=True, accumulation=accumulation
    )
    expected_nbytes = (
        expected.parameters
        + expected.gradients
        + expected.unsharded
        - arithmetic._pending_nbytes(units.block)
    )
    model = fsdp(
        module,
        auto_wrap_policy=ModuleWrapPolicy({implementations.Block}),
        use_orig_params=True,
    )
    tokens = torch.arange(8).view(1, 8)
    for _ in range(3):
        if accumulation is not None:
            with model.no_sync():
                model(tokens, tokens).backward()
        model(tokens, tokens).backward()
        model.zero_grad()
    assert _engine_nbytes(model) == expected_nbytes
