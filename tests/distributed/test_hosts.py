"""Groups on several hosts: shared memory in each, gloo between them.

FSDP_C_HOST_ID makes hosts of the ranks of this machine.
"""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fsdp_c
from helpers.distributed import distributed
from helpers.groups import hybrid_groups
from helpers.impl import MixedPrecision, fsdp
from helpers.models import CASES
from helpers.reference import Differential
from helpers.rows import APIS, in_either_api
from helpers.transports import OWN, meet, over, transport_of

pytestmark = pytest.mark.cpu_only("hosts are told apart on the CPU")


@contextlib.contextmanager
def on_hosts(*hosts: str) -> Iterator[dist.ProcessGroup]:
    """Yield a group of all ranks; rank i is on the i-th host while it meets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_C_HOST_ID", hosts[dist.get_rank()])
        group = dist.new_group()
        try:
            yield group
        finally:
            gc.collect()  # models hold the group
            dist.destroy_process_group(group)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("model", ["transformer", "uneven"])
@distributed(world_size=4)
def test_training_on_two_hosts(model: str, strategy: str, api: str) -> None:
    """As the unsharded model, with uneven parameters and accumulation.

    Small calls of ``fully_shard`` are merged.
    """
    case = CASES[model]
    with on_hosts("a", "a", "b", "b") as group:
        options: dict[str, Any] = {"process_group": group}
        if api == "fully_shard":
            options = {"mesh": DeviceMesh.from_group(group, "cpu")}
        differential = in_either_api(
            api,
            case.build,
            case.unit_classes,
            case.inputs,
            strategy=strategy,
            **options,
        )
        differential.train(2)
        differential.accumulate(2, no_sync=True)
        assert transport_of(group) == ("hierarchical", "")
        del differential, options


@distributed(world_size=4)
def test_low_precision_on_two_hosts() -> None:
    """bf16 is summed in fp32 on each level; also beside fp32 in one unit."""
    with on_hosts("a", "a", "b", "b") as group:
        differential = Differential.of_model(
            "transformer",
            process_group=group,
            mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16),
        )
        differential.train(2)
        assert transport_of(group)[0] == "hierarchical"
        differential = Differential.of_model("mixed_dtype", process_group=group)
        differential.train(2)
        del differential


@distributed(world_size=4)
def test_replicas_on_two_hosts(rank: int) -> None:
    """A replica in each host, and replicas of one rank on all hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_C_HOST_ID", f"host{rank // 2}")
        for shape, carriers in (
            ((2, 2), ("shm", "c10d")),
            ((4, 1), ("c10d", "hierarchical")),
        ):
            with hybrid_groups(*shape) as groups:
                differential = Differential.of_model(
                    "transformer", strategy="HYBRID_SHARD", process_group=groups
                )
                differential.train(2)
                assert tuple(transport_of(each)[0] for each in groups) == carriers
                del differential


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        ("aab", "the group's 2 hosts hold different numbers of its ranks"),
        ("abc", "each of the group's 3 hosts holds one of its ranks"),
    ],
)
@distributed(world_size=3)
def test_other_layouts_are_flat(hosts: str, why: str) -> None:
    """They train over gloo alone."""
    with on_hosts(*hosts) as group:
        differential = Differential.of_model("uneven", process_group=group)
        differential.train(2)
        name, reason = transport_of(group)
        assert name == "c10d"
        assert why in reason
        del differential


@distributed(world_size=4)
def test_ranks_that_do_not_follow_each_other_are_flat() -> None:
    """Hosts that take turns."""
    with on_hosts("a", "b", "a", "b") as group:
        name, reason = meet(group)
        assert name == "c10d"
        assert "do not follow each other" in reason


@pytest.mark.parametrize("value", ["flat", "c10d"])
@distributed(world_size=4)
def test_a_switch_on_one_rank_keeps_all_flat(rank: int, value: str) -> None:
    """The others hear of it."""
    switch = value if rank == 2 else OWN
    with on_hosts("a", "a", "b", "b") as group, over(switch):
        why = f"rank 2: switched off by FSDP_C_TRANSPORT={value}"
        assert meet(group) == ("c10d", why)


@distributed(world_size=4)
def test_all_ranks_are_switched_off_and_on() -> None:
    """It holds for the engines that come later, also once the ranks have met."""
    with on_hosts("a", "a", "b", "b") as group:
        for value in ("flat", "", "flat"):
            with over(value):
                model = fsdp(torch.nn.Linear(4, 4), process_group=group)
                model(torch.ones(2, 4)).sum().backward()
                nbytes = fsdp_c.memory_stats(model)["ring_nbytes"]
                assert (nbytes > 0) == (value == "")
                del model
