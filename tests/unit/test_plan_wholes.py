"""python -m fsdp_c plan --optimizer muon: what a rank steps whole.

tests/distributed/test_plan_bytes.py holds the numbers against training.
"""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_c.__main__ import main
from fsdp_c.tools.plan import ModelSource, RankPlan, Settings, Sharding, plan_model

WIDTH, NUM_BLOCKS = 64, 3
MATRIX_NBYTES = 4 * WIDTH * WIDTH


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(NUM_BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 10, bias=False)


def make() -> nn.Module:
    return Net()


def plan(optimizer: str, world_size: int = 4, **options: Any) -> RankPlan:
    source = ModelSource("net", lambda _batch, _sequence: (Net(), None))
    settings = Settings(on_cpu=True, optimizer=optimizer)
    sharding = Sharding(use_orig_params=True, **options)
    planned = plan_model(source, [world_size], sharding=sharding, settings=settings)
    return planned.ranks[0]


def test_an_owner_has_momenta_and_adamw_the_rest() -> None:
    adamw, muon = plan("adamw"), plan("muon")
    assert adamw.whole is None
    assert muon.whole is not None
    assert muon.whole.num_params == 1
    assert muon.whole.state_nbytes == MATRIX_NBYTES
    # Two moments and a step of what it has of each matrix.
    of_matrices = NUM_BLOCKS * (2 * MATRIX_NBYTES // 4 + 4)
    others = adamw.optimizer_nbytes - of_matrices
    assert muon.optimizer_nbytes == others + MATRIX_NBYTES
    # The owner of one: a quarter of the other two goes out twice, the new one comes.
    assert muon.whole.wire_nbytes == (2 * 2 + 3) * MATRIX_NBYTES // 4


def test_the_peak_is_that_of_a_round() -> None:
    """Of a model without activations, in which all else is small."""
    muon = plan("muon")
    assert muon.whole is not None
    assert muon.whole.held_nbytes == 4 * MATRIX_NBYTES
    at_rest = muon.shard_nbytes + muon.optimizer_nbytes + muon.grad_shard_nbytes
    assert muon.peak_nbytes == at_rest + muon.whole.held_nbytes
    assert muon.whole.is_peak


def test_offloaded_rounds_are_in_host_memory() -> None:
    source = ModelSource("net", lambda _batch, _sequence: (Net(), None))
    ranks = [
        plan_model(
            source,
            [4],
            sharding=Sharding(cpu_offload=True, use_orig_params=True),
            settings=Settings(optimizer=optimizer),
        ).ranks[0]
        for optimizer in ("none", "muon")
    ]
    none, muon = ranks
    assert muon.whole is not None
    # The next round is under way.
    assert muon.whole.held_nbytes == 2 * muon.whole.round_nbytes * 2
    more = muon.optimizer_nbytes + muon.whole.held_nbytes
    assert muon.host_nbytes == none.host_nbytes + more
    assert muon.peak_nbytes == none.peak_nbytes


def test_words(capsys: Any) -> None:
    words = ["plan", "--model", f"{__name__}:make", "--world-size", "4"]
    muon = [*words, "--optimizer", "muon"]
    title = "Matrices that the first rank steps whole, per step"
    assert main(words) == 0
    assert title not in capsys.readouterr().out
    assert main([*muon, "--fully-shard", "--whole", "blocks.0.*"]) == 0
    assert title in capsys.readouterr().out
    assert main(muon) == 2
    assert "add --use-orig-params" in capsys.readouterr().err
    assert main([*muon, "--fully-shard", "--whole", "block"]) == 2
    assert "no parameter is chosen, name matrices" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(3,), (4, 5, 6)])
def test_muon_is_for_matrices(shape: tuple[int, ...]) -> None:
    source = ModelSource(
        "net",
        lambda _batch, _sequence: (
            nn.ParameterDict({"a": torch.empty(shape), "b": torch.empty(7, 3)}),
            None,
        ),
    )
    settings = Settings(optimizer="muon")
    sharding = Sharding(fully_shard=True)
    whole = plan_model(source, [1], sharding=sharding, settings=settings).ranks[0].whole
    assert whole is not None
    assert (whole.num_params, whole.state_nbytes) == (1, 7 * 3 * 4)
