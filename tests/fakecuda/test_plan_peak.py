"""The peak that a plan predicts, and what torch's allocator has in training."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fakecuda.device import needs_fake
from fakecuda.peak_programs import (
    CASES,
    TENSOR_PARALLEL,
    TOKENS,
    WORLD_SIZE,
    Case,
    Net,
    share,
)
from fsdp_c import _native
from fsdp_c.tools.plan import ModelSource, Settings, Sharding, plan_model
from fsdp_c.tools.plan._trace import Inputs
from helpers.fake_ranks import fake_ranks
from helpers.programs import run_fresh

pytestmark = needs_fake
MAX_ERROR = 0.01


@pytest.fixture(scope="module")
def peaks() -> dict[str, dict[str, int]]:
    """Return what training had, by case and door."""
    found: dict[str, dict[str, int]] = json.loads(
        run_fresh("fakecuda.peak_programs", FAKE_CUDA_NOOP="alone")
    )
    return found


def planned(case: Case, door: str) -> int:
    """Return the peak of a plan, which is told what the model does not do itself."""

    def make(_batch: int, _sequence: int) -> tuple[nn.Module, Inputs]:
        tokens = torch.zeros(TOKENS, dtype=torch.long)
        model = Net(replace(case, recomputes=False))
        if case.is_tensor_parallel:
            share(model, init_device_mesh("cpu", (TENSOR_PARALLEL,)))
        return model, Inputs((tokens,))

    plan = plan_model(
        ModelSource("net", make),
        [case.num_shards],
        sharding=Sharding(
            param_dtype=case.dtype,
            reduce_dtype=torch.float32,
            use_orig_params=case.use_orig_params,
            cpu_offload=case.offloads,
            fully_shard=door == "fully_shard",
        ),
        settings=Settings(
            optimizer="none" if case.offloads else "adamw",
            recomputes=case.recomputes,
            num_batches=case.num_batches,
            offload_keep_last=case.keep_last,
            accumulation=_native.SYNC_REDUCE if case.syncs else _native.SYNC_NONE,
        ),
        wrap="Block",
    )
    assert "from the creation of each tensor to its end" in plan.notes[0]
    return plan.ranks[0].peak_nbytes


@pytest.mark.parametrize(
    ("name", "door"), [(name, door) for name in CASES for door in CASES[name].doors()]
)
def test_the_peak(peaks: dict[str, dict[str, int]], name: str, door: str) -> None:
    with fake_ranks(TENSOR_PARALLEL):
        expected = planned(CASES[name], door)
    assert peaks[name][door] == pytest.approx(expected, rel=MAX_ERROR)


def test_a_model_that_recomputes_itself_is_planned_as_it_is() -> None:
    case = CASES["recomputed"]

    def make(_batch: int, _sequence: int) -> tuple[nn.Module, Inputs]:
        return Net(case), Inputs((torch.zeros(TOKENS, dtype=torch.long),))

    own = plan_model(
        ModelSource("net", make),
        [WORLD_SIZE],
        sharding=Sharding(
            param_dtype=case.dtype, reduce_dtype=torch.float32, use_orig_params=True
        ),
        wrap="Block",
    )
    assert own.ranks[0].peak_nbytes == planned(case, "FullyShardedDataParallel")
