"""Orders between lanes that the C tests see on the tape only, with real streams.

Each body goes wrong, for some of its seeds, when the wait that it names is taken
out (docs/internals/fakecuda.md).
"""

import copy
import itertools

import torch
from torch import nn

from fakecuda.device import needs_cuda, schedules, set_schedule
from helpers.distributed import distributed
from helpers.groups import hybrid_groups
from helpers.impl import FSDP, CPUOffload, fsdp

pytestmark = needs_cuda

NUM_SEEDS = 8
DIM = 24


def keep_busy() -> torch.Tensor:
    """Give the current stream something to do."""
    x = torch.zeros(DIM)
    for _ in range(12):
        x = x + 1
    return x


@distributed(world_size=2, device="cuda")
def test_written_by_the_first_rank(rank: int) -> None:
    # summon.c, write_back_resident: the broadcast comes after what the user
    # wrote, and what the user reads after the broadcast.
    for seed in schedules(NUM_SEEDS):
        model = fsdp(
            nn.Linear(DIM, DIM, bias=False), strategy="NO_SHARD", use_orig_params=True
        )
        for step in range(6):
            expected = float(10 * seed + step + 1)
            with (
                FSDP.summon_full_params(model, rank0_only=True, writeback=True),
                torch.no_grad(),
            ):
                if rank == 0:
                    busy = keep_busy()
                    for param in model.parameters():
                        param.fill_(expected - 12)
                        param.add_(busy[0])
            seen = [param.detach() + 0 for param in model.parameters()]
            for each in seen:
                assert set(each.flatten().tolist()) == {expected}


@distributed(world_size=2, device="cuda")
def test_staged_gradients_follow_the_block() -> None:
    # reduce_unit.c, accumulate_segments: the sharded gradient comes from the host
    # to memory that COMPUTE used a moment ago, for a unit that reduces nothing.
    sizes = (DIM, DIM, 2 * DIM, 4 * DIM)
    for seed in schedules(NUM_SEEDS):
        torch.manual_seed(1)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        reference = nn.Sequential(*layers).double()
        reference[-1].requires_grad_(False)
        model = copy.deepcopy(reference)
        for index, layer in enumerate(model):
            model[index] = fsdp(
                layer, cpu_offload=CPUOffload(offload_params=True), use_orig_params=True
            )
        sharded = fsdp(
            model, cpu_offload=CPUOffload(offload_params=True), use_orig_params=True
        )
        for step in range(4):
            x = torch.randn(4, DIM, dtype=torch.float64)
            sharded(x).square().mean().backward()
            reference(x).square().mean().backward()
            with FSDP.summon_full_params(sharded, with_grads=True):
                pairs = zip(sharded.parameters(), reference.parameters(), strict=True)
                for mine, theirs in pairs:
                    if not theirs.requires_grad:
                        continue
                    torch.testing.assert_close(
                        mine.grad, theirs.grad, msg=f"seed {seed}, step {step}"
                    )


@distributed(world_size=2, device="cuda")
def test_replaced_parameter() -> None:
    # unit_views.cpp, replace_param: the unit's gather comes after the copy of the
    # new values into the shard.
    for seed in schedules(NUM_SEEDS):
        inner = fsdp(nn.Linear(DIM, DIM, bias=False), use_orig_params=True)
        first = nn.Linear(DIM, DIM, bias=False)
        nn.init.eye_(first.weight)
        model = fsdp(nn.Sequential(first, inner), use_orig_params=True)
        x = torch.eye(DIM)
        for step in range(4):
            value = float(10 * seed + step + 1)
            busy = keep_busy()
            new = torch.full((DIM, DIM), value - 12) + busy[0]
            inner.module.weight = nn.Parameter(new)
            with torch.no_grad():
                out = model(x)
            assert set(out.flatten().tolist()) == {value}, f"seed {seed}, step {step}"


@distributed(world_size=2, device="cuda")
def test_shards_in_host_memory_are_written_after_their_upload() -> None:
    # forward.c, end_iteration; _device.py, wait_for_uploads; unit_views.cpp,
    # write_back: what a forward computes is what the shards held when it ran.
    ways = ("evaluation", "load", "replaced")
    for seed, way in itertools.product(range(NUM_SEEDS), ways):
        set_schedule(seed, 1.0)
        offload = CPUOffload(offload_params=True)
        layers = [
            fsdp(nn.Linear(DIM, DIM, bias=False), cpu_offload=offload) for _ in range(2)
        ]
        model = fsdp(nn.Sequential(*layers), cpu_offload=offload)
        x = torch.eye(DIM)
        for step in range(3):
            value = float(step + 1)
            weight = torch.full((DIM, DIM), value, device="cpu")
            state = {f"{index}.weight": weight for index in range(2)}
            model.load_state_dict(state)
            keep_busy()  # uploads wait, behind blocks that compute used
            with torch.set_grad_enabled(way != "evaluation"):
                out = model(x)
            if way == "load":
                model.load_state_dict(dict.fromkeys(state, weight * 0))
            elif way == "evaluation":
                with torch.no_grad():
                    for param in model.parameters():
                        assert param.device.type == "cpu"
                        param.zero_()
            else:
                for param in model.parameters():
                    param.data = torch.zeros(param.shape, device="cpu")
                with FSDP.summon_full_params(model, writeback=False):
                    pass
            seen = set(out.detach().flatten().tolist())
            assert seen == {DIM * value * value}, f"seed {seed}, {way}, step {step}"


@distributed(world_size=4, device="cuda")
def test_replicas_are_reduced_after_shards(rank: int, world_size: int) -> None:
    # reduce_unit.c, reduce_over_replicas.
    rows = 4
    initial = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))
    batches = [torch.randn(world_size * rows, DIM) for _ in range(3)]
    reference = copy.deepcopy(initial)
    optimizer = torch.optim.SGD(reference.parameters(), lr=1.0)
    for batch in batches:
        optimizer.zero_grad()
        reference(batch).square().mean().backward()
        optimizer.step()
    with hybrid_groups(2, 2) as groups:
        for seed in schedules(NUM_SEEDS):
            model = fsdp(
                copy.deepcopy(initial),
                units=[nn.Linear],
                process_group=groups,
                strategy="HYBRID_SHARD",
                use_orig_params=True,
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for batch in batches:  # the host waits for nothing
                optimizer.zero_grad()
                model(batch[rank * rows :][:rows]).square().mean().backward()
                optimizer.step()
            with FSDP.summon_full_params(model):
                for mine, theirs in zip(
                    model.parameters(), reference.parameters(), strict=True
                ):
                    torch.testing.assert_close(mine, theirs, msg=f"seed {seed}")
            del model, optimizer
