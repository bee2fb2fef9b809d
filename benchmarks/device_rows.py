"""What device.py measures: models, ranks, and what a step of them does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from device_models import Size

PARAM_DTYPE, REDUCE_DTYPE = torch.bfloat16, torch.float32
DEVICE_NBYTES = 80 << 30

SYNC = "reduced each time"
UNSYNC = "reduced once"


@dataclass(frozen=True)
class Row:
    """One row of every table.

    Attributes:
        title: What differs from the other rows.
        size: Of the model.
        num_ranks: The group's ranks, of which the first runs.
        num_tokens: Of a forward, one sequence.
        recomputes: Every block is checkpointed.
        lora: Only adapters train.
        accumulation: How gradients of two micro-batches are added; None: there is one.
        offloads: Shards are in host memory.
        tensor_parallel: Ranks that share each matrix of a block.
    """

    title: str
    size: Size
    num_ranks: int
    num_tokens: int
    recomputes: bool = False
    lora: bool = False
    accumulation: str | None = None
    offloads: bool = False
    tensor_parallel: int = 1

    @property
    def num_units(self) -> int:
        """The blocks and the root."""
        return self.size.layers + 1

    def describe(self) -> str:
        return f"{self.title}, {self.num_ranks} ranks, {self.num_tokens:,} tokens"


# Offloading touches host memory, as FSDP1 and the host's casts do it.
B03 = Size(width=1024, layers=16, hidden=4096, vocabulary=32768)
B1 = Size(width=2048, layers=16, hidden=8192)
B8 = Size(width=4096, layers=32, hidden=14336)
B70 = Size(width=8192, layers=80, hidden=28672)
EXPERTS = Size(width=2048, layers=16, hidden=5632, experts=8)

ROWS = {
    "1.5B": Row("1.5 B", B1, 2, 2048),
    "offload": Row("0.3 B, CPU offload", B03, 2, 2048, offloads=True),
    "8B": Row("8 B", B8, 8, 4096),
    "8B-checkpointing": Row("8 B, checkpointing", B8, 8, 8192, recomputes=True),
    "8B-lora": Row("8 B, LoRA", B8, 8, 4096, lora=True),
    "8B-accumulate": Row(
        f"8 B, 2 micro-batches, {SYNC}", B8, 8, 4096, accumulation=SYNC
    ),
    "8B-no_sync": Row(
        f"8 B, 2 micro-batches, {UNSYNC}", B8, 8, 2048, accumulation=UNSYNC
    ),
    "70B": Row("70 B", B70, 64, 1024),
    "70B-checkpointing": Row("70 B, checkpointing", B70, 64, 4096, recomputes=True),
    "70B-tensor": Row(
        "70 B, checkpointing, tensor parallel 8 x 8",
        B70,
        64,
        4096,
        recomputes=True,
        tensor_parallel=8,
    ),
    "experts": Row("5 B in 8 experts, one unused", EXPERTS, 8, 4096),
}
