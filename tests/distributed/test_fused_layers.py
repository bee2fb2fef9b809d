"""nn.TransformerEncoderLayer in evaluation, with units inside of it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import distributed
from helpers.models import DIM
from helpers.rows import APIS, in_either_api

# Without nn.Linear: nn.MultiheadAttention reads its out_proj without calling it.
UNITS = [nn.MultiheadAttention, nn.LayerNorm, nn.TransformerEncoderLayer]


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 10, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.encoder(x, src_key_padding_mask=padding)
        return out.masked_fill(padding.unsqueeze(-1), 0)


def _batch(generator: torch.Generator) -> tuple[Tensor, ...]:
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[0, 3:] = True
    return torch.randn(4, 5, DIM, generator=generator), padding


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_evaluation(api: str, unit: type[nn.Module]) -> None:
    """Its kernel would read shards; also where nothing around the layer is a unit."""
    both: Any = in_either_api(api, _Encoder, {unit}, _batch)
    both.evaluate()
    both.train(2)
    both.evaluate()
