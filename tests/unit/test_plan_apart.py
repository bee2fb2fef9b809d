"""The plan of units apart; see fsdp_c._units.apart."""

import torch
from torch import Tensor, nn

from fsdp_c.tools.plan import ModelSource, Sharding, plan_model
from fsdp_c.tools.plan._trace import Inputs


class _Layer(nn.Linear):
    """A unit inside."""


class _Net(nn.Module):
    """An embedding and a head of 4 Mi elements each, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1 << 16, 64)
        self.layers = nn.ModuleList(_Layer(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 1 << 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).relu()
        out: Tensor = self.head(x)
        return out.sum()


def test_units_apart() -> None:
    """A root's large parameters are units of their own, with fully_shard() only."""
    inputs = Inputs((torch.empty(2, 3, dtype=torch.long, device="meta"),))
    source = ModelSource("net", lambda _batch, _sequence: (_Net(), inputs))
    flat, rows = (
        plan_model(source, [2], sharding=Sharding(fully_shard=by_rows), wrap="_Layer")
        for by_rows in (False, True)
    )
    layers = ["layers.0", "layers.1"]
    apart = ["embed.weight", "head.weight"]
    assert [unit.name for unit in flat.ranks[0].units] == ["", *layers]
    assert [unit.name for unit in rows.ranks[0].units] == ["", *apart, *layers]
    # The head's parameters are gone when the embedding's gradient comes.
    saved = flat.ranks[0].peak_nbytes - rows.ranks[0].peak_nbytes
    assert saved >= (1 << 22) * 4
