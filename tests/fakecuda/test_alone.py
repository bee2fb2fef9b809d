"""Rank 0 of ranks that do not exist does what it does with all of them."""

import json
from typing import Any

from fakecuda.alone_programs import APIS, NUM_LAYERS
from fakecuda.device import needs_fake
from helpers.programs import run_fresh

pytestmark = needs_fake
OURS = ("FullyShardedDataParallel", "fully_shard")  # by kernels of csrc/cuda


def figures(world_size: int, dim: int, **env: str) -> Any:
    words = ("fakecuda.alone_programs", str(world_size), str(dim))
    return json.loads(run_fresh(*words, **env))


def test_alone_as_with_peers() -> None:
    """Bytes and calls of a step are the same, in torch's APIs and in ours."""
    with_peers = figures(2, 512, FAKE_CUDA_DELAY="0")
    alone = figures(2, 512, FAKE_CUDA_NOOP="alone")
    for found in (with_peers, alone):
        for its in found["apis"].values():
            # What other streams have used is free when they come that far, and nobody
            # waits for a collective that is done.
            del its["mallocs"], its["active"], its["event_waits"]
    assert alone["apis"] == with_peers["apis"]


def test_rank_0_of_64() -> None:
    """It holds a 64th of a model of 4 GiB, and a layer of 1 GiB where it runs."""
    dim = 16384
    layer = dim * dim * 4
    found = figures(64, dim, FAKE_CUDA_NOOP="alone")
    for api in APIS:
        its = found["apis"][api]
        assert its["shards"] == NUM_LAYERS * layer // 64, (api, its)
        assert its["collectives"] == 3 * NUM_LAYERS, (api, its)  # two gathers, a sum
        assert its["mallocs"] == 0, (api, its)
        assert (its["launches"] > 0) == (api in OURS), (api, its)
        assert its["peak"] > 2 * layer, (api, its)
    assert found["touched"] < 2 * layer


def test_memory_of_a_device_behind_the_host() -> None:
    """Ours does not depend on when events are over; FSDP1 holds blocks until then."""
    found = figures(8, 2048, FAKE_CUDA_NOOP="alone")
    for api in OURS:
        assert found["behind"][api]["active"] == found["apis"][api]["active"], api
    fsdp1 = found["apis"]["FSDP1"]["active"]
    assert found["behind"]["FSDP1"]["active"] > 1.2 * fsdp1
