"""DPO with LoRA, as TRL trains it: the reference is the policy without its adapters.

peft's `disable_adapter()` freezes the adapters for the reference's forward, which may
come between the policy's forward and its backward. Compared with the model that was
never sharded.
"""

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.distributed import TEST_DEVICE, distributed
from helpers.models import VOCAB, Transformer, TransformerBlock
from helpers.rows import shard_by
from programs.unsharded import train_beside

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")

BETA = 0.5


def _build() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["qkv", "proj"], init_lora_weights=False)
    return get_peft_model(Transformer(), config).double()


def _tokens(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(TEST_DEVICE).manual_seed(10 * step + rank)
    chosen, rejected = torch.randint(0, VOCAB, (2, 3, 5), generator=generator)
    return chosen, rejected


def _log_probs(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens)[:, :-1]
    return -F.cross_entropy(
        logits.transpose(1, 2), tokens[:, 1:], reduction="none"
    ).sum(-1)


def _of_reference(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad(), model.disable_adapter():
        return _log_probs(model, tokens)


def _loss(model: Any, step: int, rank: int, *, order: str) -> Tensor:
    margins = []
    for tokens in _tokens(step, rank):
        if order == "policy first":
            margin = _log_probs(model, tokens) - _of_reference(model, tokens)
        else:
            reference = _of_reference(model, tokens)
            margin = _log_probs(model, tokens) - reference
        margins.append(margin)
    return -F.logsigmoid(BETA * (margins[0] - margins[1])).mean()


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@pytest.mark.parametrize("order", ["policy first", "reference first"])
@distributed(world_size=2)
def test_training(api: str, order: str) -> None:
    """Losses and weights; the adapters have learned, and nothing else has."""
    reference, model = _build(), _build()
    before = {n: p.detach().clone() for n, p in reference.named_parameters()}
    model = shard_by(api, model, {TransformerBlock})
    train_beside(reference, model, partial(_loss, order=order))
    for name, param in reference.named_parameters():
        assert torch.equal(param, before[name]) != ("lora" in name), name
