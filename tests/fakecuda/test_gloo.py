"""Units with tensors on a device and groups that c10d carries."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fakecuda.device import needs_cuda, schedules
from helpers.distributed import distributed
from helpers.impl import FSDP, CPUOffload, ShardingStrategy, fsdp

pytestmark = needs_cuda

NUM_SEEDS = 6
DIM = 24


def gloo_group() -> dist.ProcessGroup:
    """Make a group of all ranks that gloo carries, and nothing but gloo."""
    group = dist.new_group(backend="cpu:gloo,cuda:gloo")
    assert isinstance(group, dist.ProcessGroup)
    backend = group._get_backend(torch.device("cuda"))
    assert backend.name() == "gloo"
    return group


def train_and_compare(
    seed: int, rank: int, world_size: int, options: dict[str, Any]
) -> None:
    """Train three steps; the parameters are those of the unsharded model."""
    torch.manual_seed(seed)
    layers = [nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)]
    reference = nn.Sequential(*layers).double()
    model = copy.deepcopy(reference)
    for index in (0, 2):
        model[index] = fsdp(model[index], **options)
    sharded = fsdp(model, **options)
    mine = torch.optim.SGD(sharded.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(4 * world_size, DIM, dtype=torch.float64)
        sharded(x[4 * rank : 4 * rank + 4]).square().mean().backward()
        reference(x).square().mean().backward()
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    with FSDP.summon_full_params(sharded):
        pairs = zip(sharded.parameters(), reference.parameters(), strict=True)
        for index, (found, expected) in enumerate(pairs):
            torch.testing.assert_close(
                found, expected, msg=lambda m, i=index: f"seed {seed}, {i}: {m}"
            )


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@distributed(world_size=(2, 3), device="cuda")
def test_trains_as_the_unsharded_model(
    rank: int, world_size: int, strategy: str, offloads: bool
) -> None:
    from fsdp_c import _native

    device = torch.device("cuda")
    group = gloo_group()
    options = {
        "process_group": group,
        "sharding_strategy": ShardingStrategy[strategy],
        "cpu_offload": CPUOffload(offload_params=offloads),
        "use_orig_params": True,
    }
    for seed in schedules(NUM_SEEDS):
        train_and_compare(seed, rank, world_size, options)
    assert _native.transport(group, device)[0] == "c10d"
    torch.cuda.synchronize()
    dist.destroy_process_group(group)


@distributed(world_size=2, device="cuda")
def test_a_backend_without_options(rank: int, world_size: int) -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers it

    from fsdp_c import _native

    group = dist.new_group(backend="fake")
    model = fsdp(nn.Linear(DIM, DIM), process_group=group, use_orig_params=True)
    model(torch.ones(2, DIM)).sum().backward()
    assert _native.transport(group, torch.device("cuda"))[0] == "c10d"
    dist.destroy_process_group(group)
