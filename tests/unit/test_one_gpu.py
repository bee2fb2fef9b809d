"""Which GPU a rank of the test helper takes, and what NCCL is told."""

import pytest

from helpers.one_gpu import gpu_of_rank


def test_a_gpu_of_its_own() -> None:
    assert [gpu_of_rank(rank, 4, 8) for rank in range(4)] == [
        (rank, {}) for rank in range(4)
    ]


def test_ranks_that_share_a_gpu_are_on_different_hosts() -> None:
    found = [gpu_of_rank(rank, 3, 2) for rank in range(3)]
    assert [index for index, _ in found] == [0, 0, 0]
    assert len({variables["NCCL_HOSTID"] for _, variables in found}) == 3
    assert {variables["NCCL_SOCKET_IFNAME"] for _, variables in found} == {"lo"}


def test_without_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="finds no GPU"):
        gpu_of_rank(0, 2, 0)
