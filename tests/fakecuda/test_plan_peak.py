"""The peak that a plan predicts, and the one that training has on the fake CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
)
from torch.utils.checkpoint import checkpoint

import fsdp_c
from fakecuda.device import needs_cuda, set_schedule
from fsdp_c import _native
from fsdp_c.plan import ModelSource, Settings, Sharding, plan_model
from fsdp_c.plan._trace import Inputs
from helpers.distributed import distributed
from helpers.impl import fsdp

pytestmark = needs_cuda

# From 1 MiB on, torch's allocator gives what is asked for: most tensors are larger.
WIDTH, DEPTH, VOCABULARY, TOKENS = 256, 4, 8192, 2048
MAX_ERROR = 0.01


class Block(nn.Module):
    """What a transformer block does behind its attention."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@dataclass(frozen=True)
class Case:
    """How a model is trained.

    Attributes:
        recomputes: The model checkpoints its blocks; the plan is told so.
        frozen: Parts of the names of parameters that are not trained.
        uses_all: No parameter is unused.
    """

    dtype: torch.dtype | None = torch.bfloat16
    recomputes: bool = False
    frozen: str | None = None
    num_batches: int = 1
    accumulation: int = _native.SYNC_REDUCE
    offloads: bool = False
    uses_all: bool = True


class Net(nn.Module):
    """Tokens in, loss out."""

    def __init__(self, case: Case, *, recomputes: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            Block(recomputes=recomputes) for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for block in self.blocks:
            if case.uses_all:
                del block.unused
        for name, param in self.named_parameters():
            if case.frozen is not None and case.frozen in name:
                param.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float(), tokens)


def _planned(case: Case, door: str) -> int:
    def make(_batch: int, _sequence: int) -> tuple[nn.Module, Inputs]:
        tokens = torch.zeros(TOKENS, dtype=torch.long)
        return Net(case, recomputes=False), Inputs((tokens,))

    plan = plan_model(
        ModelSource("net", make),
        [2],
        sharding=Sharding(
            param_dtype=case.dtype,
            reduce_dtype=torch.float32,
            use_orig_params=True,
            cpu_offload=case.offloads,
            fully_shard=door == "fully_shard",
        ),
        settings=Settings(
            optimizer="none" if case.offloads else "adamw",
            recomputes=case.recomputes,
            num_batches=case.num_batches,
            accumulation=case.accumulation,
        ),
        wrap="Block",
    )
    assert "from the creation of each tensor to its end" in plan.notes[0]
    return plan.ranks[0].peak_nbytes


def _sharded(case: Case, door: str) -> Any:
    model = Net(case, recomputes=case.recomputes)
    if door == "fsdp":
        return fsdp(
            model,
            units={Block},
            mixed_precision=MixedPrecision(case.dtype, torch.float32),
            cpu_offload=CPUOffload(case.offloads),
            use_orig_params=True,
        )
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(case.dtype, torch.float32)
    }
    if case.offloads:
        options["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks:
        fsdp_c.fully_shard(block, **options)
    return fsdp_c.fully_shard(model, **options)


def _backward(model: Any, case: Case, tokens: Tensor) -> None:
    """Run all micro-batches of a step."""
    for index in range(case.num_batches):
        is_last = index + 1 == case.num_batches
        if case.accumulation == _native.SYNC_NONE:
            if isinstance(model, fsdp_c.FullyShardedDataParallel):
                if not is_last:
                    with model.no_sync():
                        model(tokens).backward()
                    continue
            else:
                model.set_requires_gradient_sync(is_last)
        model(tokens).backward()


def _measured(case: Case, door: str) -> int:
    set_schedule(0, 0.0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = _sharded(case, door)
    if case.offloads:
        make: Callable[[], Any] = lambda: None  # noqa: E731
    else:
        params = [param for param in model.parameters() if param.requires_grad]
        make = lambda: torch.optim.AdamW(params, foreach=False)  # noqa: E731
    optimizer = make()
    tokens = torch.arange(TOKENS, device="cuda") % VOCABULARY
    peak = 0
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        _backward(model, case, tokens)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        if optimizer is not None:
            optimizer.step()
        for param in model.parameters():
            param.grad = None
    return peak


CASES = {
    "bf16": Case(),
    "fp32": Case(dtype=None),
    "recomputed": Case(recomputes=True),
    "frozen": Case(frozen="up"),
    "unused": Case(uses_all=False),
    "two-batches": Case(num_batches=2),
    "no-sync": Case(num_batches=2, accumulation=_native.SYNC_NONE),
    "offloaded": Case(offloads=True),
}


@pytest.mark.parametrize("door", ["fsdp", "fully_shard"])
@pytest.mark.parametrize("name", CASES)
@distributed(world_size=2, device="cuda")
def test_the_peak(name: str, door: str) -> None:
    case = CASES[name]
    planned, measured = _planned(case, door), _measured(case, door)
    assert abs(measured / planned - 1) <= MAX_ERROR, (planned, measured)
