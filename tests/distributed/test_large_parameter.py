"""A parameter of 3 GiB: offsets in bytes beyond 31 bits, through all of a step.

`tests/unit/test_scale.py` has the arithmetic of still larger ones.
"""

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import distributed
from helpers.impl import fsdp

ROW = 1 << 20  # elements; a row has one value, to check it with little memory
NUM_ROWS = 3 * (1 << 30) // (2 * ROW)
LR = 0.5


def _value_of(row: int) -> float:
    return float(row % 128)  # exact in bf16


class _Rows(nn.Module):
    """Reads a few elements of its parameter."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(num_rows * ROW, dtype=torch.bfloat16, device="meta")
        )

    def reset_parameters(self) -> None:
        rows = torch.arange(self.weight.numel() // ROW).remainder(128)
        with torch.no_grad():
            self.weight.view(-1, ROW).copy_(rows[:, None])

    def forward(self, positions: Tensor) -> Tensor:
        return self.weight[positions]


@pytest.mark.only_full
@pytest.mark.cpu_only("needs 20 GiB")
@pytest.mark.parametrize("num_rows", [NUM_ROWS])
@distributed(world_size=2, timeout_s=600)
def test_training(rank: int, num_rows: int) -> None:
    """Elements at both ends, around 2^31 bytes and around the ranks' boundary."""
    numel = num_rows * ROW
    shard_numel = numel // 2
    positions = torch.tensor(
        [0, shard_numel - 1, shard_numel, 2 * numel // 3 - 1, 2 * numel // 3, numel - 1]
    )
    model = fsdp(_Rows(num_rows), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    # The mean over the ranks is 3, 6, 9, ...
    scale = torch.arange(1, len(positions) + 1) * (2.0 + 2.0 * rank)
    expected = torch.tensor([_value_of(int(p) // ROW) for p in positions])
    for _ in range(2):
        out = model(positions).float()
        assert torch.equal(out.detach(), expected)
        (out * scale).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected -= LR * 3 * torch.arange(1, len(positions) + 1)
    shard = next(model.parameters()).detach()
    assert shard.numel() == shard_numel
    own = (positions - rank * shard_numel).tolist()
    for position, value in zip(own, expected.tolist(), strict=True):
        if 0 <= position < shard_numel:
            assert shard[position] == value
            shard[position] = _value_of((position + rank * shard_numel) // ROW)
    for index, row in enumerate(shard.split(ROW)):
        assert row.min() == row.max() == _value_of(index + rank * num_rows // 2)
