"""What is measured: the transformer, the batch and the ranks."""

import json
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

OURS, OURS_FULLY = "fsdp_c", "fsdp_c fully_shard"
FSDP1, FSDP2, DDP = "torch FSDP1", "torch FSDP2", "torch DDP"
IMPLEMENTATIONS = (OURS, OURS_FULLY, FSDP1, FSDP2, DDP)

_HEAD_WIDTH = 64


@dataclass(frozen=True)
class Workload:
    """One measurement.

    Attributes:
        device: "cuda" or "cpu".
        num_ranks: Processes; on GPUs one each.
        width: Of the transformer, a multiple of 64 or below it.
        num_layers: Its blocks, a unit each.
        vocabulary: Tokens that it knows.
        batch: Sequences per rank.
        length: Tokens of a sequence.
        dtype: Of forward, backward and reductions; parameters are in float32.
        recomputes: Whether blocks are checkpointed.
        seconds: To train, warm-up not included, for one process.
    """

    device: str
    num_ranks: int
    width: int
    num_layers: int
    vocabulary: int
    batch: int
    length: int
    dtype: str
    recomputes: bool
    seconds: float

    def to_json(self) -> str:
        """Return it as text for a worker."""
        return json.dumps(asdict(self))

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of mixed precision; None for none."""
        return None if self.dtype == "float32" else getattr(torch, self.dtype)

    def model(self) -> "Transformer":
        """Return the same initial model on every rank and in every process."""
        torch.manual_seed(0)
        return Transformer(self)

    def describe(self) -> str:
        """Return it in words."""
        with torch.device("meta"):
            numel = sum(param.numel() for param in Transformer(self).parameters())
        recomputes = ", activation checkpointing" if self.recomputes else ""
        return (
            f"{numel / 1e6:.1f} M parameters ({self.num_layers} layers of width "
            f"{self.width}), {self.num_ranks} ranks x {self.batch} x {self.length} "
            f"tokens, {self.dtype}{recomputes}, AdamW"
        )


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        width = workload.width
        self.num_heads = max(1, width // _HEAD_WIDTH)
        self.recomputes = workload.recomputes
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` of shape [B, T, width] to the same shape."""
        if not self.recomputes:
            return self._compute(x)
        result: Tensor = checkpoint(self._compute, x, use_reentrant=False)
        return result

    def _compute(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x))
        q, k, v = (
            each.view(batch, length, self.num_heads, -1).transpose(1, 2)
            for each in qkv.chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm_mlp(x))))
        return result


class Transformer(nn.Module):
    """Tokens in, mean loss out; what is not in blocks is the root's unit."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.embedding = nn.Embedding(workload.vocabulary, workload.width)
        self.blocks = nn.Sequential(
            *(Block(workload) for _ in range(workload.num_layers))
        )
        self.norm = nn.LayerNorm(workload.width)
        self.head = nn.Linear(workload.width, workload.vocabulary, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of predicting ``targets``; both int64, shape [B, T]."""
        logits = self.head(self.norm(self.blocks(self.embedding(inputs))))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
