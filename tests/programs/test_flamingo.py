"""A frozen language model with trainable cross-attention, as open_flamingo.

Each part is wrapped by hand, twice, and nothing around them is: every part is a root of
its own. Frozen blocks pass gradients on. A step takes two backwards, of two data sets.
Each part clips by its own norm. With checkpointing, a layer that holds two roots runs
again in backward. What it passes as HYBRID_SHARD's groups on one host is a mesh (n, 1)
for torch's FSDP1, which does not reduce over it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp.wrap import enable_wrap, wrap
from torch.nn import functional

from helpers.distributed import distributed
from helpers.groups import hybrid_groups
from helpers.impl import FSDP, ShardingStrategy
from programs.unsharded import check_weights, draw, mean_over_ranks

DIM, VOCAB = 8, 12


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.inner = nn.Linear(DIM, 2 * DIM)
        self.outer = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(functional.gelu(self.inner(self.norm(x))))


class _GatedCrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.kv = nn.Linear(DIM, 2 * DIM, bias=False)
        self.gate = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor, media: Tensor) -> Tensor:
        k, v = self.kv(media).chunk(2, -1)
        scores = self.q(self.norm(x)) @ k.transpose(-1, -2)
        return x + scores.softmax(-1) @ v * self.gate.tanh()


class _Layer(nn.Module):
    def __init__(self, cross: nn.Module | None, decoder: nn.Module) -> None:
        super().__init__()
        self.cross = cross
        self.decoder = decoder
        self.media: Tensor | None = None  # set before forward

    def forward(self, x: Tensor) -> Tensor:
        if self.cross is not None:
            x = self.cross(x, self.media)
        return self.decoder(x)


class _Flamingo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Linear(DIM, DIM)
        self.perceiver = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU())
        self.embedding = nn.Embedding(VOCAB, DIM)
        crosses = [_GatedCrossAttention(), None, _GatedCrossAttention()]
        self.layers = nn.ModuleList(_Layer(cross, _Decoder()) for cross in crosses)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def plain_layers(self) -> list[_Layer]:
        return [module for module in self.modules() if isinstance(module, _Layer)]

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.vision(image)
        media = self.perceiver(seen)
        x = self.embedding(tokens)
        for layer in self.plain_layers():
            layer.media = media
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _trainable(model: _Flamingo) -> list[nn.Module]:
    crosses = [layer.cross for layer in model.plain_layers()]
    return [
        model.perceiver,
        model.embedding,
        *(cross for cross in crosses if cross is not None),
    ]


def _build() -> _Flamingo:
    torch.manual_seed(0)
    model = _Flamingo().double()
    model.requires_grad_(False)
    for part in _trainable(model):
        part.requires_grad_(True)
    return model


def _wrap(model: _Flamingo, checkpointing: str, **kwargs: Any) -> _Flamingo:
    with enable_wrap(wrapper_cls=FSDP, use_orig_params=True, **kwargs):
        for name in ("vision", "perceiver", "embedding", "head"):
            setattr(model, name, wrap(wrap(getattr(model, name))))
        for layer in model.plain_layers():
            layer.decoder = wrap(wrap(layer.decoder))
            if layer.cross is not None:
                layer.cross = wrap(wrap(layer.cross))
    again: Any = lambda module: checkpoint_wrapper(  # noqa: E731
        module, checkpoint_impl=CheckpointImpl.NO_REENTRANT
    )
    if checkpointing in ("inside", "both"):
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=again,
            check_fn=lambda m: isinstance(m, (_Decoder, _GatedCrossAttention)),
        )
    if checkpointing in ("around", "both"):
        model.layers = nn.ModuleList(again(layer) for layer in model.layers)
    return model


def _losses(model: nn.Module, step: int, rank: int) -> list[Callable[[], Tensor]]:
    def loss(seed: int) -> Tensor:
        tokens = torch.randint(
            0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(seed)
        )
        logits = model(draw(2, 4, DIM, seed=seed), tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    seeds = [100 * step + 10 * rank + data for data in range(2)]
    return [lambda seed=seed: loss(seed) for seed in seeds]  # type: ignore[misc]


def _optimizer(model: _Flamingo) -> torch.optim.Optimizer:
    perceiver, embedding, *crosses = _trainable(model)
    decayed = [param for cross in crosses for param in cross.parameters()]
    others = [*perceiver.parameters(), *embedding.parameters()]
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=0.02,
    )


def _train(rank: int, model: _Flamingo) -> None:
    reference = _build()
    mine, expected = _optimizer(model), _optimizer(reference)
    for step in range(3):
        mine.zero_grad()
        expected.zero_grad()
        for data in range(2):
            _losses(model, step, rank)[data]().backward()
            mean_over_ranks(
                lambda r, data=data, step=step: _losses(reference, step, r)[data]()
            ).backward()
        for part in _trainable(model):
            part.clip_grad_norm_(0.1)
        for part in _trainable(reference):
            nn.utils.clip_grad_norm_(part.parameters(), 0.1)
        mine.step()
        expected.step()
    check_weights(model, reference)


@pytest.mark.parametrize("checkpointing", ["none", "inside", "around", "both"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=2)
def test_weights(rank: int, strategy: str, checkpointing: str) -> None:
    """With activations kept or computed again."""
    strategy_kind = ShardingStrategy[strategy]
    _train(rank, _wrap(_build(), checkpointing, sharding_strategy=strategy_kind))


@distributed(world_size=2)
def test_hybrid_shard(rank: int, world_size: int) -> None:
    """Groups of one rank to shard over, and of all to replicate over."""
    with hybrid_groups(world_size, 1) as groups:
        _train_hybrid(rank, groups)


def _train_hybrid(rank: int, groups: Any) -> None:
    strategy = ShardingStrategy.HYBRID_SHARD
    _train(
        rank, _wrap(_build(), "none", sharding_strategy=strategy, process_group=groups)
    )
