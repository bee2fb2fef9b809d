"""Random models under whole_parameter_optimizer, to the bit against the unsharded ones.

FSDP_C_RANDOM_FIRST=123 FSDP_C_RANDOM_CASES=1 pytest ...         # one of them
"""

import random

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from helpers.distributed import TEST_DEVICE, run_task
from helpers.groups import groups_destroyed
from helpers.impl import FSDP, StateDictType
from helpers.matrix_optimizers import ANY_SHAPE, muon
from helpers.random_programs import batches_of
from helpers.whole_runs import Run, assert_states, copy_values, plain_states

MAKERS = {**ANY_SHAPE, "muon": muon}


class RandomNet(nn.Module):
    """Layers of random sizes, some of them frozen, each a unit or not."""

    def __init__(self, numbers: random.Random) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width := numbers.randint(1, 20))
        layers: list[nn.Module] = []
        for _ in range(numbers.randint(1, 5)):
            out = numbers.randint(1, 20)
            layer: nn.Module = nn.Linear(width, out, bias=numbers.random() < 0.5)
            if numbers.random() < 0.2:
                layer.requires_grad_(False)
            if numbers.random() < 0.3:
                layer = nn.Sequential(layer, nn.LayerNorm(out), nn.Tanh())
            layers.append(layer)
            width = out
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(width, numbers.randint(1, 6))

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.embed(tokens)))
        return result


def is_matrix(name: str, shape: torch.Size) -> bool:
    return len(shape) == 2


def draw_run(seed: int) -> tuple[Run, str]:
    """Return the run of a seed, and what it is in words; each time a new one."""
    numbers = random.Random(seed)
    api = numbers.choice(["FSDP", "FSDP", "fully_shard"])
    name = numbers.choice(list(MAKERS))
    is_mixed = name == "muon" or numbers.random() < 0.4
    strategies = ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    strategy = numbers.choice(strategies)
    shape_seed = numbers.randrange(2**32)

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return RandomNet(random.Random(shape_seed)).to(TEST_DEVICE)

    run = Run(
        api,
        MAKERS[name],
        is_matrix if is_mixed else None,
        rest=(lambda params: torch.optim.AdamW(params, lr=0.01)) if is_mixed else None,
        build=build,
        strategy=strategy,
    )
    return run, f"{api} {strategy} {name} {'and AdamW' if is_mixed else ''}"


def run_case(rank: int, world_size: int, seed: int) -> None:
    """Train, compare values and states, and go on from a saved state."""
    torch.manual_seed(seed)
    with groups_destroyed():
        run, words = draw_run(seed)
        try:
            run.train(2)
            if isinstance(run.model, FSDP):
                with FSDP.state_dict_type(run.model, StateDictType.FULL_STATE_DICT):
                    saved = FSDP.optim_state_dict(run.model, run.optimizer)
            else:
                saved = get_optimizer_state_dict(run.model, run.optimizer)
            assert_states(saved["state"], plain_states(run))
            other, _ = draw_run(seed)
            copy_values(run, other)
            other.optimizer.load_state_dict(run.optimizer.state_dict())
            other.train(1, first=2)
        except Exception as error:
            raise AssertionError(f"case {seed}: {words}, {world_size} ranks") from error


@pytest.mark.parametrize(
    ("world_size", "seeds"),
    batches_of(num_short=9, num_full=200, size=10),
)
def test_random_models(world_size: int, seeds: tuple[int, ...]) -> None:
    """See :func:`run_case`."""
    for seed in seeds:
        run_task(run_case, world_size=world_size, arguments={"seed": seed})
