"""What one rank does in tests/cuda: python scenarios.py NAME FOLDER DEVICE.

Each scenario takes the rank's device and raises when something is wrong. They also run
on the CPU over gloo (``DEVICE`` cpu), so that this code is exercised without a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.profiler import ProfilerActivity, profile

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import fsdp_c  # noqa: E402
from fsdp_c import FullyShardedDataParallel  # noqa: E402

NUM_STEPS = 4
# Of the norm of a parameter's change. fp32: the sums of a GPU have another order, and
# matrices of TF32 are off by default. bf16: 8 bits in every activation and gradient.
FP32_TOLERANCE = 1e-3
BF16_TOLERANCE = 5e-2
# So large that what rounding does to parameters is little beside their changes.
LEARNING_RATE = 1.0
MAX_NORM = 0.1  # less than the gradients have
MIN_CHANGE = 1e-4  # of the norm of a parameter: less is no training
WIDTH = 48  # no multiple of 32 in the hidden layer: edges of vectors


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 5))


def sharded_model(device: torch.device, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        plain_model(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=device,
        **options,
    )


def batch_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, WIDTH, generator=generator)


def train_on_the_cpu(world_size: int) -> list[Tensor]:
    """Train the plain model on all ranks' batches; return its parameters."""
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(NUM_STEPS):
        for rank in range(world_size):
            (model(batch_of(rank, step)).square().mean() / world_size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def train(model: FullyShardedDataParallel, device: torch.device) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(NUM_STEPS):
        model(batch_of(dist.get_rank(), step).to(device)).square().mean().backward()
        model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def compare(model: FullyShardedDataParallel, tolerance: float) -> None:
    with FullyShardedDataParallel.summon_full_params(model):
        actual = [param.detach().to("cpu", copy=True) for param in model.parameters()]
    check_changes(
        [param.detach() for param in plain_model().parameters()],
        actual,
        train_on_the_cpu(dist.get_world_size()),
        tolerance,
    )


def check_changes(
    before: Sequence[Tensor],
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    tolerance: float,
) -> None:
    """Compare how parameters changed, not their values, of which training moves little.

    Raises:
        AssertionError: The change of a parameter is wrong by more than ``tolerance``
            times its norm.
    """
    for index, (old, new, right) in enumerate(
        zip(before, actual, expected, strict=True)
    ):
        moved = (right - old).norm().item()
        wrong = (new - right).norm().item()
        assert moved > MIN_CHANGE * old.norm().item(), f"parameter {index} did not move"
        assert wrong <= tolerance * moved, (
            f"parameter {index} moved by {moved:.3g}, off by {wrong / moved:.2%}, "
            f"more than {tolerance:.2%}"
        )


def full_shard(device: torch.device) -> None:
    model = sharded_model(device)
    train(model, device)
    compare(model, FP32_TOLERANCE)


def no_shard(device: torch.device) -> None:
    model = sharded_model(device, sharding_strategy=ShardingStrategy.NO_SHARD)
    train(model, device)
    compare(model, FP32_TOLERANCE)


def shard_grad_op(device: torch.device) -> None:
    model = sharded_model(device, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    train(model, device)
    compare(model, FP32_TOLERANCE)


def bf16(device: torch.device) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = sharded_model(device, mixed_precision=precision)
    train(model, device)
    compare(model, BF16_TOLERANCE)


def gradient_accumulation(device: torch.device) -> None:
    """Two halves of a batch with no_sync give the gradient of the whole."""
    model = sharded_model(device)
    batch = batch_of(dist.get_rank(), 0).to(device)
    model(batch).square().mean().backward()
    whole = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with model.no_sync():
        (model(batch[:3]).square().mean() / 2).backward()
    (model(batch[3:]).square().mean() / 2).backward()
    halves = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(whole) == len(halves) > 0
    for one, other in zip(whole, halves, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def memory(device: torch.device) -> None:
    """What the engine says that it holds is what torch's allocator gave it."""
    warm_up = plain_model().to(device)  # cuBLAS keeps workspaces of the allocator
    warm_up(batch_of(0, 0).to(device)).square().mean().backward()
    del warm_up
    before = _held(device)
    model = sharded_model(device)
    for step in range(3):
        model.zero_grad()
        model(batch_of(dist.get_rank(), step).to(device)).square().mean().backward()
    stats = fsdp_c.memory_stats(model)
    expected = sum(
        stats[f"{name}_nbytes"]
        for name in ("shard", "grad_shard", "arena", "scratch", "partial_grad")
    )
    assert expected > 0
    if device.type == "cuda":
        assert _held(device) - before == expected


def _held(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_stats(device)["requested_bytes.all.current"]


def launches(device: torch.device) -> None:
    """A unit takes a launch per stage, however many parameters it has."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded_model(device, mixed_precision=precision)
    batch = batch_of(dist.get_rank(), 0).to(device)
    model(batch).square().mean().backward()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        model(batch).square().mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if device.type != "cuda":
        return
    names = [event.name for event in profiler.events() if "pack_kernel" in event.name]
    num_units = 3
    # Per unit: a cast of the shard for forward, a pack, an accumulate; a cast for
    # backward if it was resharded, and zeros where the layout has padding. ATen takes
    # a launch or two per parameter.
    assert 3 * num_units <= len(names) <= 5 * num_units, names


def captured_step(device: torch.device) -> None:
    """Steps that replay a graph change the parameters as plain ones do, to the bit."""
    changed = []
    for is_captured in (False, True):
        model = sharded_model(device)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=torch.tensor(0.1, device=device), capturable=True
        )

        def train_step(
            batch: Tensor,
            model: FullyShardedDataParallel = model,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> Tensor:
            loss = model(batch).square().mean()
            loss.backward()
            norm = model.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        step: Callable[[Tensor], Tensor] = train_step
        if is_captured and device.type != "cuda":
            with pytest.raises(RuntimeError, match="on the CPU cannot be captured"):
                fsdp_c.capture_step(train_step, model, optimizer)
            return
        if is_captured:
            step = fsdp_c.capture_step(train_step, model, optimizer, warmup=2)
        elif device.type != "cuda":
            continue  # there AdamW is not capturable
        norms = [
            step(batch_of(dist.get_rank(), number).to(device)).clone()
            for number in range(2 + NUM_STEPS)
        ]
        changed.append([*norms, *(param.detach() for param in model.parameters())])
    for captured, plain in zip(*changed, strict=True):
        assert torch.equal(captured, plain)


SCENARIOS: dict[str, Callable[[torch.device], None]] = {
    scenario.__name__: scenario
    for scenario in (
        full_shard,
        no_shard,
        shard_grad_op,
        bf16,
        gradient_accumulation,
        memory,
        launches,
        captured_step,
    )
}


def main(name: str, folder: str, kind: str) -> None:
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=Path(folder, "store").as_uri(),
        rank=rank,
        world_size=world_size,
        device_id=device if kind == "cuda" else None,
    )
    SCENARIOS[name](device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
