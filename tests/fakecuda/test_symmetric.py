"""Symmetric memory under whole models, over the fake libnccl."""

import ctypes
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fakecuda.device import needs_fake
from helpers.distributed import distributed
from helpers.impl import fsdp

pytestmark = needs_fake

SWITCH = "FSDP_C_NCCL_SYMMETRIC"
NUM_UNITS = 4


class Fake:
    """What the fake libnccl counts in this process."""

    def __init__(self) -> None:
        library = ctypes.CDLL(os.environ["FSDP_C_NCCL_LIBRARY"])
        library.fake_nccl_num_windows.restype = ctypes.c_longlong
        library.fake_nccl_num_in_windows.restype = ctypes.c_longlong
        library.fake_nccl_num_blocks.restype = ctypes.c_longlong
        library.fake_nccl_places.restype = ctypes.c_ulonglong
        self._library = library

    def __getattr__(self, name: str) -> int:
        return int(getattr(self._library, f"fake_nccl_{name}")())

    def run_out_of_memory(self, is_out: bool) -> None:
        """Let ncclMemAlloc fail on this rank from now on, or no more."""
        self._library.fake_nccl_run_out_of_memory(ctypes.c_bool(is_out))


def make(group: dist.ProcessGroup) -> nn.Module:
    torch.manual_seed(0)
    units = [
        fsdp(nn.Linear(16, 16), use_orig_params=True, process_group=group)
        for _ in range(NUM_UNITS)
    ]
    return fsdp(nn.Sequential(*units), use_orig_params=True, process_group=group)


def train(model: nn.Module, num_steps: int, rank: int) -> list[torch.Tensor]:
    """Return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(num_steps):
        x = torch.randn(4, 16, generator=generator, device="cpu").to("cuda")
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def windows_of(group: dist.ProcessGroup) -> str:
    from fsdp_c import _native

    name, text = _native.transport(group, torch.device("cuda"))
    assert name == "nccl"
    return text


def run(
    switch: str, rank: int, then: Callable[[nn.Module, dist.ProcessGroup], None]
) -> list[torch.Tensor]:
    """Train with the switch; return losses and parameters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, switch)
        patch.setenv("FSDP_C_NCCL_SPLIT", "1")
        group = dist.new_group()
        model = make(group)
        results = train(model, 14, rank)
        then(model, group)
        results += [param.detach().clone() for param in model.parameters()]
        del model
        dist.destroy_process_group(group)
    return results


@distributed(world_size=(2, 3), device="cuda")
def test_training_in_windows(rank: int, world_size: int) -> None:
    """The same bits as without; every rank's collectives at the same places."""
    from fsdp_c import memory_stats

    fake = Fake()
    digests: list[int | None] = [None] * world_size

    def check(model: nn.Module, group: dist.ProcessGroup) -> None:
        assert "gathers: symmetric windows of" in windows_of(group)
        assert "reductions: symmetric windows of" in windows_of(group)
        stats = memory_stats(model)
        assert stats["arena_nbytes"] == 0  # they are kept for the next step
        assert stats["symmetric_nbytes"] >= stats["peak_nbytes"] > 0
        assert fake.num_windows > 0
        before = fake.num_in_windows
        train(model, 2, rank)
        # Each unit's reduction at least; units but the first gather, twice or once.
        assert fake.num_in_windows - before >= 2 * 2 * NUM_UNITS
        # In another order than before: a forward after a forward.
        with torch.no_grad():
            for _ in range(2):
                model(torch.randn(4, 16))
        model.state_dict()
        assert "watched anew" in windows_of(group)
        train(model, 2, rank)
        dist.all_gather_object(digests, fake.places)

    def check_off(model: nn.Module, group: dist.ProcessGroup) -> None:
        assert windows_of(group) == ""
        assert memory_stats(model)["symmetric_nbytes"] == 0
        train(model, 2, rank)
        train(model, 2, rank)

    num_blocks = fake.num_blocks
    symmetric = run("1", rank, check)
    assert len(set(digests)) == 1
    assert (fake.num_windows, fake.num_blocks) == (0, num_blocks)
    plain = run("0", rank, check_off)
    for got, expected in zip(symmetric, plain, strict=True):
        assert torch.equal(got.cpu(), expected.cpu())


@distributed(world_size=2, device="cuda")
def test_rank_without_symmetric_memory(rank: int) -> None:
    """Its blocks come from torch's allocator, and no rank has windows."""
    fake = Fake()

    def check(model: nn.Module, group: dist.ProcessGroup) -> None:
        del model
        assert "no symmetric windows, rank 1: no collective uses memory" in windows_of(
            group
        )
        assert fake.num_in_windows == before

    before = fake.num_in_windows
    fake.run_out_of_memory(rank == 1)
    try:
        run("1", rank, check)
    finally:
        fake.run_out_of_memory(False)


@distributed(world_size=2, device="cuda")
def test_equal_models_over_one_group(rank: int) -> None:
    """They have memory of their own, beside each other and in turn."""
    fake = Fake()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "1")
        group = dist.new_group()
        first = make(group)
        second = make(group)
        before = fake.num_in_windows
        for _ in range(11):
            train(first, 1, rank)
            train(second, 1, rank)
        assert fake.num_in_windows > before, windows_of(group)
        del first, second
        for _ in range(2):
            train(make(group), 11, rank)
        dist.destroy_process_group(group)
    assert fake.num_windows == 0


@distributed(world_size=2, device="cuda")
def test_captured_steps_are_refused(rank: int) -> None:
    """A replay would go on using windows that were closed."""
    from fsdp_c import capture_step

    def check(model: nn.Module, group: dist.ProcessGroup) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with pytest.raises(RuntimeError, match=f"symmetric windows.*{SWITCH}"):
            capture_step(model, model, optimizer)

    run("1", rank, check)
    run("0", rank, lambda model, _: check_captures(model))


def check_captures(model: nn.Module) -> None:
    """Without windows it can be captured."""
    from fsdp_c import capture_step

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    capture_step(model, model, optimizer)
