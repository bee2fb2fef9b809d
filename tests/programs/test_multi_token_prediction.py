"""Multi-token prediction: further heads share the root's unembedding.

Each head is a unit that makes the hidden states of a later token. The loss puts those
through the unembedding that the embedding shares, after the model's own logits, or when
forward has returned: backward then gets to weights of the root before its output does.
Compared with the model that was never sharded.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.distributed import TEST_DEVICE, distributed
from helpers.impl import fsdp
from helpers.models import VOCAB, Transformer, TransformerBlock
from helpers.reference import assert_same
from helpers.rows import shard_units
from programs.unsharded import check_weights

TIME = 5  # of the model's positions
NUM_AHEAD = 2


class _Model(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.ahead = nn.ModuleList(TransformerBlock() for _ in range(NUM_AHEAD))
        self.logits_ahead: list[Tensor] = []
        self.hidden: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        self.hidden = []
        for block in self.blocks:
            x = block(x)
            self.hidden.append(x)
        logits: Tensor = self.head(self.norm(x))
        self.logits_ahead = []
        for block in self.ahead:
            x = block(x)
            self.logits_ahead.append(self.head(self.norm(x)))
        return logits


def _build() -> nn.Module:
    torch.manual_seed(0)
    return _Model().double()


def _tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator(TEST_DEVICE).manual_seed(10 * step + rank)
    return torch.randint(0, VOCAB, (3, TIME + 1 + NUM_AHEAD), generator=generator)


def _loss(model: Any, step: int, rank: int, use: str) -> Tensor:
    tokens = _tokens(step, rank)
    logits = model(tokens[:, :TIME])
    (inner,) = (m for m in model.modules() if isinstance(m, _Model))
    all_logits = [logits, *inner.logits_ahead]
    if use == "heads alone":
        all_logits[0] = logits.detach()
    losses = [
        F.cross_entropy(each.flatten(0, 1), tokens[:, k + 1 : k + 1 + TIME].flatten())
        for k, each in enumerate(all_logits)
    ]
    loss = torch.stack(losses).sum()
    if use == "hidden states":
        loss = loss + 0.1 * sum(hidden.square().mean() for hidden in inner.hidden)
    return loss


@pytest.mark.each_value
@pytest.mark.parametrize("api", ["FSDP", "FSDP flat", "fully_shard"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("use", ["heads", "heads alone", "hidden states"])
@distributed(world_size=2)
def test_training(rank: int, api: str, strategy: str, use: str) -> None:
    """Losses of each step, and weights at the end."""
    reference = _build()
    if api == "fully_shard":
        reshards = None if strategy == "FULL_SHARD" else False
        model = shard_units(
            _build(), {TransformerBlock}, reshard_after_forward=reshards
        )
    else:
        model = fsdp(
            _build(),
            units={TransformerBlock},
            strategy=strategy,
            use_orig_params=api == "FSDP",
        )
    optimizers = [torch.optim.AdamW(m.parameters(), 0.02) for m in (reference, model)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = [_loss(reference, step, r, use) for r in range(2)]
        torch.stack(expected).mean().backward()
        loss = _loss(model, step, rank, use)
        assert_same("loss", loss.detach(), expected[rank].detach(), 1e-9)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    check_weights(model, reference)
