"""csrc/nccl under whole models: the bridge joins every group through it."""

import copy
import ctypes
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_c
from fakecuda.device import needs_fake, num_collectives
from fsdp_c import _native
from helpers.distributed import distributed
from helpers.impl import fsdp
from helpers.transports import over

pytestmark = needs_fake

NUM_UNITS = 3


@distributed(world_size=(2, 3), device="cuda")
def test_collectives_go_through_nccl() -> None:
    model = nn.Sequential(*(fsdp(nn.Linear(8, 8)) for _ in range(NUM_UNITS)))
    sharded = fsdp(model)
    x = torch.randn(2, 8)
    sharded(x).sum().backward()
    assert _native.transport(dist.group.WORLD, torch.device("cuda")) == (
        "nccl",
        "",
    )
    before = num_collectives()
    sharded(x).sum().backward()
    # At least a gather and a reduction of each unit.
    assert num_collectives() - before >= 2 * NUM_UNITS
    for norm_type in (2.0, float("inf")):
        before = num_collectives()
        sharded.clip_grad_norm_(1.0, norm_type)
        assert num_collectives() - before == 1


@distributed(world_size=2, device="cuda")
def test_options_of_the_group_reach_nccl() -> None:
    """What c10d's ProcessGroupNCCL.Options holds; this backend's has no config."""
    config = SimpleNamespace(
        blocking=0,
        cga_cluster_size=2,
        min_ctas=4,
        max_ctas=-(2**31),  # NCCL's "undefined"
        net_name="Socket",
    )
    options = SimpleNamespace(config=config, is_high_priority_stream=True)
    group = dist.new_group()
    backend = type(group._get_backend(torch.device("cuda")))
    backend.options = property(lambda self: options)
    try:
        model = fsdp(nn.Linear(8, 8), process_group=group)
        model(torch.randn(2, 8)).sum().backward()
    finally:
        del backend.options
        dist.destroy_process_group(group)
    library = ctypes.CDLL(os.environ["FSDP_C_NCCL_LIBRARY"])
    library.fake_nccl_last_config.restype = ctypes.c_char_p
    assert library.fake_nccl_last_config().decode() == (
        "blocking=1 cga_cluster_size=2 min_ctas=4 max_ctas=-2147483648 "
        "net_name=Socket split_share=-2147483648"
    )


@pytest.mark.parametrize("syncs", [False, True])
@distributed(world_size=2, device="cuda")
def test_communicators_are_made_when_needed(rank: int, syncs: bool) -> None:
    """One, for gathers, reductions and the first values; c10d makes none."""
    library = ctypes.CDLL(os.environ["FSDP_C_NCCL_LIBRARY"])
    library.fake_nccl_num_comms.restype = ctypes.c_longlong
    group = dist.new_group()
    before = library.fake_nccl_num_comms()
    layer = nn.Linear(8, 8)
    nn.init.constant_(layer.weight, rank)
    model = fsdp(layer, process_group=group, sync_module_states=syncs)
    assert library.fake_nccl_num_comms() - before == syncs
    model(torch.randn(2, 8)).sum().backward()
    assert library.fake_nccl_num_comms() - before == 1
    if syncs:
        with fsdp_c.FullyShardedDataParallel.summon_full_params(model):
            assert torch.equal(layer.weight, torch.zeros(8, 8))
    dist.destroy_process_group(group)


@distributed(world_size=(2, 3), device="cuda")
def test_c10d_makes_one_launch_of_a_units_parameters() -> None:
    """A unit by rows has a segment of each; the gradients are those over NCCL."""
    gradients = []
    for transport in ("nccl", "c10d"):
        group = dist.new_group()
        mesh = DeviceMesh.from_group(group, "cuda")
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(NUM_UNITS)))
        for layer in model:
            fsdp_c.fully_shard(layer, mesh=mesh)
        fsdp_c.fully_shard(model, mesh=mesh)
        x = torch.randn(2, 8)
        with over(transport):
            model(x).sum().backward()
        assert _native.transport(group, torch.device("cuda"))[0] == transport
        model.zero_grad()
        before = num_collectives()
        model(x).sum().backward()
        # Of each unit two gathers, of forward and backward, and a reduction.
        assert num_collectives() - before == 3 * NUM_UNITS, transport
        gradients.append([param.grad.full_tensor() for param in model.parameters()])
        del model
        dist.destroy_process_group(group)
    for own, of_c10d in zip(*gradients, strict=True):
        torch.testing.assert_close(of_c10d, own)


class _Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.turns).abs()


@distributed(world_size=2, device="cuda")
def test_complex_parameters_over_c10d() -> None:
    """NCCL has no complex numbers, and c10d refuses them."""
    torch.manual_seed(0)
    reference = _Turn()
    model = copy.deepcopy(reference)
    group = dist.new_group()
    fsdp_c.fully_shard(model, mesh=DeviceMesh.from_group(group, "cuda"))
    x = torch.randn(2, 8)
    reference(x).sum().backward()
    with over("c10d"):
        model(x).sum().backward()
    assert _native.transport(group, torch.device("cuda"))[0] == "c10d"
    torch.testing.assert_close(model.turns.grad.full_tensor(), reference.turns.grad)
    del model
    dist.destroy_process_group(group)
