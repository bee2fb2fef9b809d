"""Several ranks on one GPU: what NCCL has to be told, so that one GPU is enough.

NCCL refuses two ranks of a communicator on one GPU of a host ("Duplicate GPU
detected"). Ranks that name different hosts pass this check, in all versions; they
then reach each other through sockets, here on the loopback interface.
"""

import os
from collections.abc import Mapping

import torch


def one_gpu_environment(rank: int) -> Mapping[str, str]:
    """Return the variables of a process whose ranks share a GPU; before NCCL starts."""
    return {
        "NCCL_HOSTID": f"fsdp_c_test_rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_NET_PLUGIN": "none",
    }


def gpu_of_rank(
    rank: int, world_size: int, num_gpus: int
) -> tuple[int, Mapping[str, str]]:
    """Return the index of a rank's GPU and the variables that its process needs.

    Each rank has a GPU of its own where there are enough; else all share the first.

    Raises:
        RuntimeError: There is no GPU.
    """
    if num_gpus == 0:
        raise RuntimeError(
            "FSDP_C_TEST_DEVICE=cuda, but torch finds no GPU: run the tests on a "
            "machine with one, or without one on the fake CUDA (make cuda-test)"
        )
    if num_gpus >= world_size:
        return rank, {}
    return 0, one_gpu_environment(rank)


def set_up_device(device: str, rank: int, world_size: int) -> str:
    """Make the device under test the default one; return the backends' names."""
    if device == "cpu":
        return "gloo"
    assert device == "cuda", f"FSDP_C_TEST_DEVICE={device}: cpu or cuda"
    index, variables = gpu_of_rank(rank, world_size, torch.cuda.device_count())
    os.environ.update(variables)
    torch.cuda.set_device(index)
    torch.set_default_device(torch.device("cuda", index))
    torch.backends.cudnn.allow_tf32 = False  # of recurrent layers and convolutions
    return "cpu:gloo,cuda:nccl"
