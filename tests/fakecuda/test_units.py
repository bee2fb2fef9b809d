"""Sharded models where torch's streams, allocators and graphs have a say."""

import copy
import ctypes
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp_c
from fakecuda.device import count, needs_cuda, needs_fake, schedules
from helpers.distributed import distributed
from helpers.groups import kept_mesh
from helpers.impl import FSDP, fsdp
from helpers.programs import run_fresh

pytestmark = needs_cuda

DIM = 8
NUM_ROOTS = 12
TOLERANCE = 1e-5


@distributed(world_size=2, device="cuda")
def test_more_engines_than_torch_has_streams(rank: int) -> None:
    """Each root has an engine; their lanes are more than the 32 streams of torch."""
    for _ in schedules(4):
        layers = [nn.Linear(DIM, DIM) for _ in range(NUM_ROOTS)]
        reference = nn.Sequential(*copy.deepcopy(layers))
        model = nn.Sequential(*(fsdp(layer, use_orig_params=True) for layer in layers))
        whole = torch.randn(4, DIM)
        model(whole[2 * rank :][:2]).square().mean().backward()
        reference(whole).square().mean().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            for mine, theirs in zip(
                model.parameters(), reference.parameters(), strict=True
            ):
                torch.testing.assert_close(mine, theirs)
                torch.testing.assert_close(mine.grad, theirs.grad)


def _in_bf16(layers: list[nn.Module], api: str, *, offloads: bool) -> nn.Module:
    """Return units of fp32 shards that compute in bf16."""
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    model: nn.Module = nn.Sequential(*layers)
    if api == "fully_shard":
        policy = CPUOffloadPolicy() if offloads else OffloadPolicy()
        for module in (*layers, model):
            fsdp_c.fully_shard(
                module, mp_policy=MixedPrecisionPolicy(**dtypes), offload_policy=policy
            )
        return model
    return fsdp(
        model,
        auto_wrap_policy=lambda module, recurse, **_: recurse or module in layers,
        mixed_precision=MixedPrecision(**dtypes),
        cpu_offload=CPUOffload(offload_params=offloads),
        use_orig_params=True,
    )


@distributed(world_size=2, device="cuda")
def test_memory_of_the_host_is_pinned() -> None:
    """Offloaded shards, their gradients, and what is summoned to the host."""
    offload = CPUOffload(offload_params=True)
    model = fsdp(nn.Linear(DIM, DIM), use_orig_params=True, cpu_offload=offload)
    model(torch.ones(4, DIM)).sum().backward()
    for param in model.parameters():
        if param.numel() > 0:
            assert param.is_pinned()
            assert param.grad.is_pinned()
    model = fsdp(nn.Linear(DIM, DIM), use_orig_params=True)
    with FSDP.summon_full_params(model, offload_to_cpu=True, writeback=False):
        for param in model.parameters():
            assert param.is_pinned()


@needs_fake
@distributed(world_size=2, device="cuda")
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("api", ["FullyShardedDataParallel", "fully_shard"])
def test_calls_of_a_unit(api: str, offloads: bool) -> None:
    """They are as many, however many parameters it has."""
    counted = ("launches", "event_records", "event_waits")
    num_units = 3
    found = []
    for num_linears in (1, 4):
        layers: list[nn.Module] = [
            nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(num_linears)))
            for _ in range(num_units)
        ]
        model = _in_bf16(layers, api, offloads=offloads)
        x = torch.randn(4, DIM, device="cuda")
        for step in range(5):
            if step % 2 == 0:  # every other step adds to the gradients
                model.zero_grad()
            before = [count(name) for name in counted]
            model(x).float().square().mean().backward()
            torch.cuda.synchronize()
            calls = [count(name) for name in counted]
            found.append([a - b for a, b in zip(calls, before, strict=True)])
            # Casts for forward and for backward, a pack; an accumulate, if there is
            # something to add to. Of 2 ranks an offloaded shard comes in halves.
            num_launches = 3 + step % 2 + 2 * offloads
            assert found[-1][0] == num_launches * num_units, (num_linears, step, found)
    for few, many in zip(found[2:5], found[7:10], strict=True):
        assert few[:2] == many[:2], found
        # Nobody waits for a collective that is done.
        assert abs(few[2] - many[2]) <= num_units, found


@distributed(world_size=2, device="cuda")
@pytest.mark.parametrize("offloads", [False, True])
def test_one_rank_adds_to_its_gradient(rank: int, offloads: bool) -> None:
    """The ranks' collective is the same, whether one has something to add to or not."""
    model = _in_bf16([nn.Linear(DIM, DIM)], "fully_shard", offloads=offloads)
    x = torch.ones(4, DIM, device="cuda")
    model(x).float().sum().backward()
    once = [param.grad.to_local().clone() for param in model.parameters()]
    if rank == 0:
        model.zero_grad()
    model(x).float().sum().backward()
    for param, grad in zip(model.parameters(), once, strict=True):
        assert grad.any()
        torch.testing.assert_close(param.grad.to_local(), (1 + rank) * grad)


def test_an_allocator_in_the_order_of_streams() -> None:
    """Its memory is there from its turn in the stream on, not at once."""
    said = run_fresh(
        "fakecuda.programs",
        "train",
        PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync",
    )
    error, backend = said.split()
    assert backend == "cudaMallocAsync"
    assert float(error) < TOLERANCE


def test_captured_steps_under_expandable_segments() -> None:
    """NCCL must not register buffers that several handles make up."""
    said = run_fresh(
        "fakecuda.programs",
        "capture",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )
    assert float(said) < TOLERANCE


@needs_fake
def test_a_replay_has_a_time_limit() -> None:
    said = run_fresh("fakecuda.programs", "half_a_replay")
    assert "replay of a captured step" in said
    assert "did not end within 12" in said


@needs_fake
@distributed(world_size=2, device="cuda")
def test_nccl_keeps_the_order_of_launches() -> None:
    """Also where torch launched first."""
    dist.barrier()
    fsdp_c.fully_shard(nn.Linear(DIM, DIM))(torch.ones(2, DIM))
    nccl = ctypes.CDLL("libnccl.so.2")
    nccl.fake_nccl_keeps_order.restype = ctypes.c_bool
    assert nccl.fake_nccl_keeps_order()


@needs_fake
def test_shapes_only() -> None:
    """Memory counts and is not there; nothing is computed."""
    said = run_fresh("fakecuda.programs", "shapes_only", FAKE_CUDA_NOOP="1")
    used, touched = map(int, said.split())
    assert used >= 40  # GiB: shards, gradients and two states, of 2 GiB a layer
    assert touched <= 2


@distributed(world_size=2, device="cuda")
def test_the_default_stream_inside_a_capture(rank: int) -> None:
    """A call from it neither joins the capture nor makes it wait."""
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    for layer in model:
        fsdp_c.fully_shard(layer)
    fsdp_c.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        y = model[0](x)
        with torch.cuda.stream(torch.cuda.default_stream()):
            model[1].unshard()
        loss = model[1](y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step = fsdp_c.capture_step(train_step, model, optimizer, warmup=1)
    losses = [step(torch.ones(2, DIM)).item() for _ in range(4)]
    assert step.is_captured
    assert losses == sorted(losses, reverse=True)


@distributed(world_size=4, device="cuda")
def test_a_capture_fails_on_all_tensor_parallel_ranks(rank: int) -> None:
    mesh = kept_mesh((2, 2), ("data", "tensor"))
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    parallelize_module(
        model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()}
    )
    fsdp_c.fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def train_step(x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if rank == 3 and torch.cuda.is_current_stream_capturing():
            raise ValueError("not on this rank")

    step = fsdp_c.capture_step(train_step, model, optimizer, warmup=1)
    step(torch.ones(2, DIM))
    reason = "not on this rank" if rank == 3 else "another rank could not"
    with pytest.raises(RuntimeError, match=reason):
        step(torch.ones(2, DIM))


def test_memory_beside_torch() -> None:
    """At the end of forward, at the peak, and what the allocator takes for it.

    With the bf16 parameters and fp32 reductions of a model with embeddings. After the
    second step torch's allocator has all that it needs.
    """
    said = run_fresh("fakecuda.programs", "memory", FAKE_CUDA_NOOP="1")
    found = json.loads(said)
    for name in ("fully_shard", "FullyShardedDataParallel"):
        ours, theirs = found[f"fsdp_c.{name}"], found[f"torch.{name}"]
        assert ours["end_of_forward"] <= 1.001 * theirs["end_of_forward"]
        assert ours["peak"] <= 0.96 * theirs["peak"]
        assert ours["reserved"] <= 0.85 * theirs["reserved"]
        assert ours["late_device_allocs"] == 0
