"""What carries collectives: shared memory where the ranks share a host, or c10d.

All other distributed tests run over shared memory (on an accelerator over NCCL); here
the same models train over c10d, and the parts that only shared memory has are tested.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_c import fully_shard
from fsdp_c._native import Placement, pass_messages, prepare_exchange
from helpers.distributed import distributed, every_strategy
from helpers.groups import hybrid_groups
from helpers.impl import fsdp
from helpers.reference import Differential
from helpers.seeds import seeded
from helpers.transports import OWN, c10d_only, meet, over, transport_of

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64]


@every_strategy
@distributed(world_size=(2, 3))
def test_training_over_c10d(strategy: str, use_orig_params: bool) -> None:
    """As over shared memory: losses, gradients and parameters."""
    with c10d_only():
        for model in ("transformer", "uneven", "mixed_dtype"):
            differential = Differential.of_model(
                model, strategy=strategy, use_orig_params=use_orig_params
            )
            differential.train(2)
            differential.accumulate(2, no_sync=True)


@pytest.mark.cpu_only("gloo sums in host memory")
@pytest.mark.parametrize("transport", [OWN, "c10d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@distributed(world_size=(3, 4))
def test_bits_of_sums(
    rank: int, world_size: int, transport: str, dtype: torch.dtype
) -> None:
    """They are those of torch.distributed's reduce_scatter over gloo."""
    generator = seeded(rank)
    given = torch.rand(12, 64, generator=generator) + 1
    given *= torch.randint(0, 2, given.shape, generator=generator) * 2 - 1
    expected = torch.empty(12 // world_size, 64, dtype=dtype)
    dist.reduce_scatter_tensor(expected, given.to(dtype))
    group = dist.new_group()
    with over(transport):
        module = torch.nn.Linear(64, 12, bias=False)
        fully_shard(
            module,
            mesh=DeviceMesh.from_group(group, "cpu"),
            mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype),
        )
        module.set_gradient_divide_factor(1.0)
        (module(torch.eye(64)).t() * given).sum().backward()
        assert transport_of(group)[0] == transport
    assert torch.equal(module.weight.grad.to_local(), expected.float())
    del module
    dist.destroy_process_group(group)


@distributed(world_size=(2, 3))
def test_the_default_is_no_c10d() -> None:
    """From the first engine on, and for every group."""
    group = dist.new_group()
    assert transport_of(group) == ("c10d", "the group has not been used yet")
    assert meet(group) == (OWN, "")
    dist.destroy_process_group(group)


@distributed(world_size=(2, 3))
def test_a_switch_on_one_rank_holds_for_all(rank: int) -> None:
    """The others hear of it and do not wait; without it they meet again."""
    group = dist.new_group()
    with over("c10d" if rank == 1 else OWN):
        why = "rank 1: switched off by FSDP_C_TRANSPORT=c10d"
        assert meet(group) == ("c10d", why)
    dist.destroy_process_group(group)


@distributed(world_size=2)
def test_a_value_that_means_nothing_is_refused() -> None:
    match = "=gloo: set it to c10d, flat, rings or copy"
    with over("gloo"), pytest.raises(ValueError, match=match):
        fsdp(torch.nn.Linear(4, 4))(torch.ones(2, 4))


@distributed(world_size=2)
def test_a_group_that_was_switched_off_can_meet_later() -> None:
    """Once its ranks are switched on, all of them."""
    group = dist.new_group()
    for transport in ("c10d", OWN):
        with over(transport):
            assert meet(group)[0] == transport
    dist.destroy_process_group(group)


@distributed(world_size=4)
def test_replicas_have_transports_of_their_own() -> None:
    """Neither group of a hybrid mesh is carried by c10d."""
    with hybrid_groups(2, 2) as groups:
        model = fsdp(
            torch.nn.Linear(4, 4), process_group=groups, strategy="HYBRID_SHARD"
        )
        model(torch.ones(2, 4)).sum().backward()
        for group in groups:
            assert transport_of(group) == (OWN, "")
        del model


@pytest.mark.bookkeeping
@distributed(world_size=(2, 3))
def test_messages(rank: int, world_size: int) -> None:
    """Of all sizes and dtypes, to every other rank at once."""

    def content(sender: int, receiver: int, numel: int, dtype: torch.dtype) -> object:
        seed = 1000 * sender + 10 * receiver + numel % 7
        generator = seeded(seed)
        values = torch.randint(0, 2, (numel,), generator=generator).cpu()
        return values.to(dtype)

    sizes = [0, 1, 63, 4096, 3_000_001]
    peers = [peer for peer in range(world_size) if peer != rank]
    outgoing, incoming, expected = [], [], []
    for numel, dtype in zip(sizes, DTYPES, strict=True):
        for peer in peers:
            outgoing.append((peer, content(rank, peer, numel, dtype)))
            incoming.append((peer, torch.empty(numel, dtype=dtype, device="cpu")))
            expected.append(content(peer, rank, numel, dtype))
    own = [torch.arange(numel, device="cpu") for numel in (5, 3_000_001)]
    alone = Placement.on_ranks([each.numel() for each in own], 0, 1)
    moves = [
        (each, each.dtype, i, alone, alone, None, None) for i, each in enumerate(own)
    ]
    cpu = torch.device("cpu")
    results, *_, copies, _ = prepare_exchange(0, 1, moves, cpu, direct_nbytes=1)
    assert pass_messages(dist.group.WORLD, "test", outgoing, incoming, copies)
    assert all(map(torch.equal, results, own))
    for (_, found), wanted in zip(incoming, expected, strict=True):
        assert torch.equal(found, wanted)
    with c10d_only():
        assert not pass_messages(dist.group.WORLD, "test", outgoing, incoming)


@distributed(world_size=2)
def test_wrong_messages(rank: int) -> None:
    """Refused before anything is passed."""
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="not contiguous"):
        pass_messages(
            group, "test", [(1 - rank, torch.ones(4, 4, device="cpu").t())], []
        )
    with pytest.raises(ValueError, match="not a tensor"):
        pass_messages(group, "test", [(1 - rank, "text")], [])
    with pytest.raises(TypeError, match="tuple"):
        pass_messages(group, "test", [torch.ones(1)], [])
    with pytest.raises(ValueError, match=r"rank|receiver|peer"):
        pass_messages(group, "test", [(7, torch.ones(1, device="cpu"))], [])
    with pytest.raises(ValueError, match="copies of an exchange"):
        pass_messages(group, "test", [], [], [])
    here = torch.full((3,), float(rank), device="cpu")
    there = torch.empty(3, device="cpu")
    assert pass_messages(group, "test", [(1 - rank, here)], [(1 - rank, there)])
    assert there.tolist() == [1.0 - rank] * 3
