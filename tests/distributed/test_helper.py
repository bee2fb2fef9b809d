"""The helper itself: what a failure, a hang, a crash and a skip look like."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from helpers import distributed as helper
from helpers.distributed import distributed
from helpers.groups import groups_destroyed

pytestmark = pytest.mark.bookkeeping


def _message(body: Callable[..., None], timeout_s: float = 30.0) -> str:
    """Return the failure message of ``body`` on two ranks."""
    with pytest.raises(pytest.fail.Exception) as info:
        helper.run_task(body, 2, {}, timeout_s)
    return str(info.value)


def _passes(rank: int, world_size: int) -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size


def _fails_on_rank_1(rank: int, world_size: int) -> None:
    _passes(rank, world_size)  # so that the other has come here
    if rank == 1:
        msg = "wrong on purpose"
        raise ValueError(msg)
    dist.barrier()


def _resets_signals(rank: int, world_size: int) -> None:
    """As Lightning's Trainer does at its end."""
    for number in (signal.SIGUSR1, signal.SIGSEGV):
        signal.signal(number, signal.SIG_DFL)


def _fails_alike(rank: int, world_size: int) -> None:
    value = world_size
    assert value == 7


def _hangs_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        _sleep_for_ever()


def _sleep_for_ever() -> None:
    while True:
        time.sleep(0.05)


def _dies_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def _exits_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(3)


def _leaves_grad_off(rank: int, world_size: int) -> None:
    torch.set_grad_enabled(False)


def _leaves_a_group(rank: int, world_size: int) -> None:
    dist.new_group([0, 1])


def _uses_a_mesh(rank: int, world_size: int) -> None:
    with groups_destroyed():
        names = ("one", "other")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)["other"]
        parts = [
            distribute_tensor(torch.ones(2, 2, device="cpu"), mesh, [placement])
            for placement in (Shard(1), Shard(0))
        ]
        product = (parts[0] @ parts[1]).redistribute(placements=[Replicate()])
        assert product.to_local().tolist() == [[2.0, 2.0]] * 2


def _skips(rank: int, world_size: int) -> None:
    pytest.skip("not today")


def _skips_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        pytest.skip("not today")


def test_failure_shows_the_rank_and_where_the_others_are() -> None:
    """The traceback of the rank that failed, and the stack of the one that waits."""
    helper.run_task(_resets_signals, 2, {})
    message = _message(_fails_on_rank_1)
    assert message.startswith("rank 1 of 2 failed:\nTraceback")
    assert "ValueError: wrong on purpose" in message
    assert "rank 0 of 2" in message
    assert "barrier" in message
    helper.run_task(_passes, 2, {})


def test_equal_failures_stand_once() -> None:
    """Ranks that fail alike share a message, with pytest's detail of the assert."""
    message = _message(_fails_alike)
    assert message.startswith("ranks 0, 1 of 2 failed:")
    assert message.count("Traceback") == 1
    assert "assert 2 == 7" in message


def test_hang_shows_every_late_rank() -> None:
    """Stacks instead of silence; the next test has fresh workers."""
    helper.run_task(_passes, 2, {})  # loading this file may take loaded cores a second
    message = _message(_hangs_on_rank_0, timeout_s=1.0)
    assert "rank 0 of 2 did not finish within 1 s" in message
    assert "_sleep_for_ever" in message
    helper.run_task(_passes, 2, {})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (_dies_on_rank_1, "rank 1 of 2 failed:\nprocess ended with signal SIGSEGV"),
        (_exits_on_rank_0, "rank 0 of 2 failed:\nprocess ended with exit status 3"),
        (_leaves_grad_off, "left over after the test: gradients are disabled"),
        (_leaves_a_group, "process groups were not destroyed"),
        (_skips_on_rank_0, "ranks disagree: {0: 'skipped', 1: 'passed'}"),
    ],
)
def test_other_failures(body: Callable[..., None], expected: str) -> None:
    """A crash, an exit, leftovers, half a skip."""
    assert expected in _message(body)


def test_skip() -> None:
    """A skip of all ranks is a skip, with its reason."""
    with pytest.raises(pytest.skip.Exception, match="not today"):
        helper.run_task(_skips, 2, {})


def test_meshes_of_earlier_tests_are_forgotten() -> None:
    """An equal mesh has groups of its own; DTensor remembers the first one's."""
    for _ in range(2):
        helper.run_task(_uses_a_mesh, 4, {})


def test_workers_are_reused_and_end() -> None:
    """One set of processes serves many tests; none outlives its pool."""
    helper.run_task(_passes, 2, {})
    pool = helper._pools[2, helper.TEST_DEVICE]
    pids = pool.pids
    helper.run_task(_passes, 2, {})
    assert helper._pools[2, helper.TEST_DEVICE].pids == pids
    helper._pools.pop((2, helper.TEST_DEVICE)).close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("value", [1, (2, "x")])
@distributed(world_size=(2, 3))
def test_arguments(rank: int, world_size: int, value: object) -> None:
    """Parametrised values arrive; ranks and seeds are as they should be."""
    assert value in (1, (2, "x"))
    assert dist.get_rank() == rank
    assert dist.get_world_size() == world_size
    assert torch.get_num_threads() == 1
    assert "pytest" in sys.modules
    drawn = [torch.zeros(1) for _ in range(world_size)]
    dist.all_gather(drawn, torch.rand(1))
    assert all(bool(d == drawn[0]) for d in drawn)
