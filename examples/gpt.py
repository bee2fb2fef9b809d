"""A small GPT over bytes: the model that train_lm.py trains.

An ordinary PyTorch model; nothing in this file knows about sharding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_BYTES = 256


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the defaults give 9.9 million parameters."""

    num_blocks: int = 4
    num_heads: int = 7
    width: int = 448
    context: int = 128


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        """Create the projections and the table of rotations."""
        super().__init__()
        self.num_heads = config.num_heads
        self.to_qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.to_out = nn.Linear(config.width, config.width, bias=False)
        half = config.width // config.num_heads // 2
        speeds = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(config.context), speeds)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate ``x`` of shape [B, heads, T, head width] by its positions."""
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Mix ``x`` of shape [B, T, width] along T, from the past only."""
        batch, time, width = x.shape
        qkv = self.to_qkv(x).view(batch, time, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            self.rotate(q), self.rotate(k), v, is_causal=True
        )
        out: Tensor = self.to_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    """One transformer block: the natural unit to shard."""

    def __init__(self, config: GPTConfig) -> None:
        """Create attention and MLP, each behind its norm."""
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape."""
        x = x + self.attention(self.norm_attention(x))
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: GPTConfig) -> None:
        """Create the model with GPT-2's initial values."""
        super().__init__()
        if config.width % (2 * config.num_heads) != 0:
            raise ValueError(
                f"width {config.width} must be a multiple of twice the number of "
                f"heads, {config.num_heads}"
            )
        self.config = config
        self.embedding = nn.Embedding(NUM_BYTES, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.num_blocks)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, NUM_BYTES, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                into_residual = name.endswith(("to_out.weight", "mlp.2.weight"))
                scale = (2 * config.num_blocks) ** -0.5 if into_residual else 1.0
                nn.init.normal_(param, std=0.02 * scale)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits, or with ``targets`` the mean loss in nats per byte.

        Args:
            inputs: Byte values, int64. Shape [B, T] with T at most the context.
            targets: The byte that follows each input. Shape [B, T].

        Returns:
            Logits of shape [B, T, 256], or a scalar.
        """
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(inputs))))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, temperature: float) -> bytes:
        """Continue ``prompt`` (not empty) by ``num_bytes`` sampled bytes."""
        text = torch.tensor([list(prompt)], device=self.embedding.weight.device)
        for _ in range(num_bytes):
            logits = self(text[:, -self.config.context :])[:, -1]
            probabilities = functional.softmax(logits.float() / temperature, dim=-1)
            text = torch.cat((text, torch.multinomial(probabilities, 1)), dim=1)
        return bytes(text[0].tolist())
