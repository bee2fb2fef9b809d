"""What is measured: the transformer, the batch and the ranks."""

import json
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

_HEAD_WIDTH = 64


@dataclass(frozen=True)
class Workload:
    """One measurement."""

    device: str  # "cuda" or "cpu"
    num_ranks: int  # processes; on GPUs one each
    width: int  # of the transformer, a multiple of 64 or below it
    num_layers: int  # its blocks, a unit each
    vocabulary: int  # tokens that it knows
    batch: int  # sequences per rank
    length: int  # tokens of a sequence
    dtype: str  # of forward, backward and reductions; parameters are in float32
    recomputes: bool  # whether blocks are checkpointed
    seconds: float  # to train, warm-up not included, for one process

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
        return Transformer(
            self.width,
            self.num_layers,
            max(1, self.width // _HEAD_WIDTH),
            self.vocabulary,
            recomputes=self.recomputes,
        )

    def describe(self) -> str:
        """Return it in words."""
        with torch.device("meta"):
            numel = sum(param.numel() for param in self.model().parameters())
        recomputes = ", activation checkpointing" if self.recomputes else ""
        return (
            f"{numel / 1e6:.1f} M parameters ({self.num_layers} layers of width "
            f"{self.width}), {self.num_ranks} ranks x {self.batch} x {self.length} "
            f"tokens, {self.dtype}{recomputes}, AdamW"
        )


class Block(nn.Module):
    """Attention and MLP, each behind a norm: 16 parameters."""

    def __init__(self, width: int, num_heads: int, *, recomputes: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.recomputes = recomputes
        self.norm_attention = nn.LayerNorm(width)
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.Linear(width, width)
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
        normed = self.norm_attention(x)
        q, k, v = (
            project(normed).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.to_out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm_mlp(x))))
        return result


class Transformer(nn.Module):
    """Tokens in, mean loss out; what is not in blocks is the root's unit."""

    def __init__(
        self,
        width: int,
        num_layers: int,
        num_heads: int,
        vocabulary: int,
        *,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(
            *(Block(width, num_heads, recomputes=recomputes) for _ in range(num_layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of predicting ``targets``; both int64, shape [B, T]."""
        logits = self.head(self.norm(self.blocks(self.embedding(inputs))))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
