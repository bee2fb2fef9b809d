"""The models of device.py: of real sizes, on the meta device.

Attention keeps what a fused kernel keeps, and computes nothing: the fake CUDA has no
such kernel, and with shapes only nothing is computed anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from memory_worker import Adapted
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

LORA_RANK = 16
EXPERTS_PER_TOKEN = 2
HEAD_WIDTH = 128


@dataclass(frozen=True)
class Size:
    """A model's sizes. Key and value have a quarter of the width, as in Llama 3."""

    width: int
    layers: int
    hidden: int
    vocabulary: int = 128256
    experts: int = 0

    def describe(self) -> str:
        numel = sum(param.numel() for param in make_model(self).parameters())
        experts = f", {self.experts} experts a layer" if self.experts else ""
        return (
            f"{numel / 1e9:.1f} B parameters: {self.layers} layers, {self.width:,} "
            f"wide, hidden {self.hidden:,}{experts}, vocabulary {self.vocabulary:,}"
        )


class _Attention(torch.autograd.Function):
    """Allocates and keeps what FlashAttention does: inputs, output, one sum a row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        del grads
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        """Make three matrices."""
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, width] to the same."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """A router and experts, of which the last gets no token in this step.

    Which expert a token goes to depends on no value: each of the others gets as many.
    """

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        """Make the router and the experts."""
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Gated(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, width] to the same."""
        weights = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        used = list(self.experts)[:-1]
        share = EXPERTS_PER_TOKEN * len(x) // len(used)
        for index, expert in enumerate(used):
            tokens = torch.arange(share, device=x.device)
            weight = weights[:, index].index_select(0, tokens).unsqueeze(-1)
            out = out.index_add(0, tokens, expert(x.index_select(0, tokens)) * weight)
        return out


class Block(nn.Module):
    """Attention and a gated network, or experts; a unit."""

    def __init__(self, size: Size, *, recomputes: bool) -> None:
        """Make the matrices of one layer."""
        super().__init__()
        self.recomputes = recomputes
        width = size.width
        self.norm_attention = nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width // 4, bias=False)
        self.v = nn.Linear(width, width // 4, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.RMSNorm(width)
        self.mlp = (
            Experts(width, size.hidden, size.experts)
            if size.experts
            else Gated(width, size.hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, width] to the same."""
        if not self.recomputes:
            return self._compute(x)
        out: Tensor = checkpoint(self._compute, x, use_reentrant=False)
        return out

    def _compute(self, x: Tensor) -> Tensor:
        normed = self.norm_attention(x)
        q, k, v = (
            project(normed).unflatten(-1, (-1, HEAD_WIDTH))
            for project in (self.q, self.k, self.v)
        )
        x = x + self.out(_Attention.apply(q, k, v).flatten(-2))
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class Model(nn.Module):
    """Tokens in, loss out; embedding, last norm and head are the root's unit."""

    def __init__(self, size: Size, *, recomputes: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(
            Block(size, recomputes=recomputes) for _ in range(size.layers)
        )
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        # Called when backward comes to the last block.
        self.at_last_block: Callable[[], None] = lambda: None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting ``tokens``, of shape [T]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.at_last_block())
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float(), tokens)


def make_model(size: Size, *, recomputes: bool = False, lora: bool = False) -> Model:
    """Return a model on the meta device; of LoRA, frozen but for its adapters."""
    with torch.device("meta"):
        model = Model(size, recomputes=recomputes)
        if not lora:
            return model
        model.requires_grad_(False)
        for module in list(model.blocks.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Adapted(child, LORA_RANK))
    return model


def share_matrices(model: Model, mesh: DeviceMesh) -> None:
    """Let the ranks of ``mesh`` share the blocks' matrices: tensor parallelism."""
    columns = ("q", "k", "v", "mlp.gate", "mlp.up")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("out", "mlp.down")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
