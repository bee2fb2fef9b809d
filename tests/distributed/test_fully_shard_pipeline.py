"""fully_shard beside ``torch.distributed.pipelining``: 2 pipeline ranks."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_c import fully_shard
from fsdp_c.integrations import installed
from helpers.distributed import distributed
from helpers.groups import kept_mesh
from helpers.seeds import seeded

DIM, NUM_MICRO_BATCHES = 6, 4
SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
# With several stages on each rank.
INTERLEAVED = {
    "interleaved": "ScheduleInterleaved1F1B",
    "zero bubble": "ScheduleInterleavedZeroBubble",
    "v zero bubble": "ScheduleZBVZeroBubble",
}


class _Recomputed(nn.Sequential):
    """Begins and ends with a sharded module; the norm is of the stage's own unit."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(layers[0], nn.LayerNorm(DIM), layers[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return output


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a sum, so that micro-batches add up."""
    return (output - target).square().sum()


@pytest.mark.parametrize(
    ("name", "reshards"),
    [
        *itertools.product(["gpipe", "1f1b", "interleaved"], [True, False]),
        ("zero bubble", False),
        ("v zero bubble", False),
    ],
)
@distributed(world_size=(2, 4))
def test_schedules(name: str, reshards: bool) -> None:
    """Gradients and parameters after two steps, against the whole model."""
    compare(name, reshards)


@pytest.mark.parametrize("name", ["1f1b", "zero bubble", "v zero bubble"])
@distributed(world_size=(2, 4))
def test_schedules_of_recomputed_stages(name: str) -> None:
    """A split backward recomputes sharded modules from inside of a stage, twice."""
    compare(name, False, stage_class=_Recomputed)


@distributed(world_size=2)
def test_schedule_while_installed() -> None:
    """Torch's stages then ask fsdp_c's fully_shard for the state of a module."""
    with installed():
        compare("1f1b", True)


@pytest.mark.parametrize("name", ["zero bubble", "v zero bubble"])
@distributed(world_size=2)
def test_whole_backward_of_sharded_parameters(name: str) -> None:
    """Without a split: what the error of a split one advises."""
    compare(name, True, dw_builder=lambda: lambda: None)


def compare(
    name: str,
    reshards: bool,
    stage_class: type[nn.Sequential] = nn.Sequential,
    **options: Any,
) -> None:
    """Train both; ``options`` are of each stage."""
    # Imports torch's compiler: collecting tests goes without.
    from torch.distributed import pipelining

    torch.manual_seed(0)
    mesh = kept_mesh((2, dist.get_world_size() // 2), ("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    num_dp = dp.size()
    num_stages = 4 if name in INTERLEAVED else 2
    whole = [
        stage_class(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)).double()
        for _ in range(num_stages)
    ]
    reference = nn.Sequential(*copy.deepcopy(whole))
    pp_rank, dp_rank = pp.get_local_rank(), dp.get_local_rank()
    group = pp.get_group()
    mine: Any = range(pp_rank, num_stages, 2)
    if name == "v zero bubble":
        mine = (pp_rank, num_stages - 1 - pp_rank)
    stages: list[Any] = []
    for index in mine:
        for layer in (whole[index][0], whole[index][2]):
            fully_shard(layer, mesh=dp, reshard_after_forward=reshards)
        fully_shard(whole[index], mesh=dp, reshard_after_forward=reshards)
        stages.append(
            pipelining.PipelineStage(
                whole[index],
                index,
                num_stages,
                torch.get_default_device(),
                group=group,
                **options,
            )
        )
    kind: Any = getattr(pipelining, {**SCHEDULES, **INTERLEAVED}[name])
    schedule = kind(
        stages if name in INTERLEAVED else stages[0],
        NUM_MICRO_BATCHES,
        loss_fn=loss_fn,
        scale_grads=False,
    )
    params = [p for index in mine for p in whole[index].parameters()]
    expected = [p for index in mine for p in reference[index].parameters()]
    optimizer = torch.optim.SGD(params, lr=0.01)
    every = torch.optim.SGD(reference.parameters(), lr=0.01)
    for step in range(2):
        generator = seeded(step)
        x = torch.randn(num_dp, 8, DIM, generator=generator, dtype=torch.float64)
        y = torch.randn(num_dp, 8, DIM, generator=generator, dtype=torch.float64)
        (loss_fn(reference(x.flatten(0, 1)), y.flatten(0, 1)) / num_dp).backward()
        args = (x[dp_rank],) if pp_rank == 0 else ()
        has_last = num_stages - 1 in mine
        schedule.step(*args, target=y[dp_rank] if has_last else None)
        for param, other in zip(params, expected, strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), other.grad)
        optimizer.step()
        every.step()
        for param, other in zip(params, expected, strict=True):
            torch.testing.assert_close(param.full_tensor(), other)
        for each in (optimizer, every):
            each.zero_grad()
