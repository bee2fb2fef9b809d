"""Memory of an optimizer of whole parameters: rounds of a step, and state."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_c import whole_parameter_optimizer
from helpers.allocations import counted
from helpers.distributed import distributed
from helpers.matrix_optimizers import muon
from helpers.models import loss_of
from helpers.whole_runs import shard

WIDTH, NUM_BLOCKS = 64, 32
MATRIX_NBYTES = WIDTH * WIDTH * 4
ROUND = 4  # matrices


class Square(nn.Sequential):
    """Equal matrices, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
                for _ in range(NUM_BLOCKS)
            )
        )


def _peak_of_a_step(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that the second step allocates at most."""
    for _ in range(2):
        loss_of(model(torch.ones(2, WIDTH))).backward()
        with counted() as allocations:
            optimizer.step()
        optimizer.zero_grad()
    return allocations.peak_nbytes


@pytest.mark.cpu_only("counts torch's CPU allocator")
@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=(2, 4))
def test_a_step_takes_two_batches(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than AdamW's: twice the values and gradients of a round, packed or not."""
    monkeypatch.setattr("fsdp_c._whole.optimizer.ROUND_NBYTES", ROUND * MATRIX_NBYTES)
    batch = 2 * ROUND * MATRIX_NBYTES
    slack = 2**14  # counters, messages without bytes
    model = shard(api, Square())
    adamw = _peak_of_a_step(model, torch.optim.AdamW(model.parameters()))
    model = shard(api, Square())
    optimizer = whole_parameter_optimizer(model, muon)
    assert optimizer.memory_stats()["round_nbytes"] == 0
    peak = _peak_of_a_step(model, optimizer)
    assert batch <= peak <= adamw + 2 * batch + slack
    stats = optimizer.memory_stats()
    assert stats["round_nbytes"] == batch
    assert stats["num_rounds"] == NUM_BLOCKS // dist.get_world_size() // ROUND
    monkeypatch.setattr("fsdp_c._state.exchange.DIRECT_NBYTES", 1024)
    peak = _peak_of_a_step(model, whole_parameter_optimizer(model, muon))
    assert batch <= peak <= adamw + 1.5 * batch + slack


class Blocks(nn.Sequential):
    """The matrices of a transformer's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(WIDTH, 3 * WIDTH, bias=False),
                    nn.Linear(3 * WIDTH, WIDTH, bias=False),
                    nn.Linear(WIDTH, 4 * WIDTH, bias=False),
                    nn.Linear(4 * WIDTH, WIDTH, bias=False),
                )
                for _ in range(12)
            )
        )


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=(2, 3, 4))
def test_state_is_dealt_out(world_size: int, api: str) -> None:
    """Each rank has its part of the unsharded optimizer's state, within 5 %."""
    model = shard(api, Blocks())
    total = sum(param.numel() for param in Blocks().parameters())
    optimizer = whole_parameter_optimizer(model, muon)
    loss_of(model(torch.ones(2, WIDTH))).backward()
    optimizer.step()
    stats = optimizer.memory_stats()
    momenta = [each["momentum_buffer"] for each in optimizer.optimizer.state.values()]
    assert stats["state_nbytes"] == sum(each.nbytes for each in momenta)
    assert stats["num_params"] == len(momenta)
    assert 0.95 <= stats["state_nbytes"] / (4 * total / world_size) <= 1.05
