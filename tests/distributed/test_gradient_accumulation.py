"""Several backwards before a step: no_sync, accumulation outside it, both."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from helpers.distributed import STRATEGIES, distributed, every_strategy, varied
from helpers.groups import kept_mesh
from helpers.impl import FSDP, CPUOffload, fsdp
from helpers.models import CASES, OneElement
from helpers.reference import Differential, with_model
from helpers.rows import APIS, in_either_api

# See `Differential.run`.
SCHEDULES = {
    "no_sync": "znnsu znsu zsu znnnsu",
    "outside": "zsssu zsssu",
    "both": "zssnnsku Zssnnsku zssnnsku",
    "zeros": "Znsu Zsu Znnsu",
    "never cleared": "nsu nsu nsu",
    "on top of a sharded one": "snsu",
    "sharded": "zpsu zpppsku zsu zppsku",
    "sharded and not": "zpsu zpnpsku zsu zpnsku",
}


@pytest.mark.trap(10)
@pytest.mark.trap(11)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["mlp", "uneven", "called_twice", "unused"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("offloads", [False, True])
@distributed(world_size=(2, 3))
def test_schedule(
    model: str, schedule: str, offloads: bool, strategy: str, api: str
) -> None:
    """Micro batches that reduce, keep whole gradients, or keep sharded sums."""
    options: dict[str, Any] = {"cpu_offload": CPUOffload(offload_params=offloads)}
    if api == "fully_shard":
        options = {"offload_policy": CPUOffloadPolicy()} if offloads else {}
    case = CASES[model]
    differential = in_either_api(
        api,
        case.build,
        case.unit_classes,
        case.inputs,
        strategy=strategy,
        **options,
    )
    differential.run(SCHEDULES[schedule])
    differential.evaluate()


@every_strategy
@distributed(world_size=(2, 3))
@with_model()
def test_cleared_in_between(differential: Differential) -> None:
    """zero_grad() clears what no_sync() kept; by rows the user does not see it."""
    differential.run("znzsu znzsu")


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [
        ("NO_SHARD", "znrsu Znrnrsu"),
        *((strategy, "zprsu Zprprsu srsu") for strategy in STRATEGIES),
    ],
)
@distributed(world_size=(2, 3))
@with_model("uneven")
def test_replaced_in_between(
    differential: Differential, schedule: str, strategy: str, use_orig_params: bool
) -> None:
    """A gradient that the user sets counts in the place of what it replaces."""
    differential.run(schedule)


@every_strategy
@distributed(world_size=2)
@with_model("uneven")
def test_load_between(differential: Differential) -> None:
    """Weights loaded between micro batches, also where a rank's part is empty."""
    state = {
        name: value * 0.5 for name, value in differential.reference.state_dict().items()
    }
    differential.zero_grad()
    with differential.model.no_sync():
        differential.forward_backward()
    differential.model.load_state_dict(state)
    differential.reference.load_state_dict(state)
    differential.forward_backward()
    differential.check()


@varied(use_orig_params=[True, False])
@distributed(world_size=2)
@with_model()
def test_other_units_in_each_micro_batch(differential: Differential) -> None:
    """What only a no_sync micro batch touched is reduced in the end."""
    for skipped in (1, 0, 2):
        differential.zero_grad()
        with differential.model.no_sync():
            differential.forward_backward()
        both: tuple[Any, ...] = (differential.reference, differential.model)
        blocks = [model.blocks[skipped] for model in both]
        for block in blocks:
            block.forward = torch.nn.Identity().forward
        differential.forward_backward()
        for block in blocks:
            del block.forward
        # The reference reduces what no_sync left; so must the sharded model, once
        # the unit takes part in a synced backward again.
        differential.forward_backward()
        differential.checked_step()


@distributed(world_size=2)
@with_model(strategy="NO_SHARD")
def test_no_sync_does_not_communicate_gradients(
    differential: Differential, rank: int, world_size: int
) -> None:
    """Inside no_sync the ranks' gradients stay their own; exceptions end it."""
    model = differential.model
    (batch,) = differential.batches()[rank]
    with model.no_sync():
        model(batch).sum().backward()
    mine = torch.cat([p.grad.flatten() for p in model.parameters()])
    other = [torch.zeros_like(mine) for _ in range(world_size)]
    torch.distributed.all_gather(other, mine)
    assert not torch.equal(other[0], other[1])
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    differential.zero_grad()
    differential.forward_backward()
    differential.check()


class _Scaled(nn.Module):
    """Has two outputs; of one of its units most ranks hold no element."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.scale = OneElement()
        self.aside = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.inp(x)
        return self.scale(hidden), self.aside(hidden)


@pytest.mark.parametrize("num_replicas", [1, 2])
@distributed(world_size=4)
def test_unit_that_the_last_backward_misses(num_replicas: int) -> None:
    """Ranks without a gradient of it do not know of the sums that others hold."""
    torch.manual_seed(0)
    reference = _Scaled()
    options: dict[str, Any] = {}
    if num_replicas > 1:
        mesh = kept_mesh((num_replicas, 4 // num_replicas), ("replicate", "shard"))
        options = {"strategy": "HYBRID_SHARD", "device_mesh": mesh}
    model = fsdp(
        copy.deepcopy(reference), units={OneElement}, use_orig_params=True, **options
    )
    x = torch.randn(3, 4)  # of all ranks
    for _ in range(2):
        for step in range(3):
            synced = nullcontext() if step == 2 else model.no_sync(sharded=True)
            for each, context in ((reference, nullcontext()), (model, synced)):
                with context:
                    scaled, aside = each(x)
                    loss = aside.square().mean()
                    if step < 2:
                        loss = loss + scaled.square().mean()
                    loss.backward()
    with FSDP.summon_full_params(model, with_grads=True):
        grads = [param.grad for param in model.parameters()]
        expected = [param.grad for param in reference.parameters()]
        torch.testing.assert_close(grads, expected)
