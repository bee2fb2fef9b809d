"""The ways in which the benchmarks' model is parallelised."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_c.tools.bench import _implementations as bench

BARE = "bare"
FSDP_C_ORIG = "fsdp_c-orig"
FSDP_C_FLAT = "fsdp_c-flat"
FSDP_C_C10D = "fsdp_c-c10d"
FSDP_C_FULLY = "fsdp_c-fully_shard"
FSDP1_ORIG = "fsdp1-orig"
FSDP1_FLAT = "fsdp1-flat"
FSDP2 = "fsdp2"
DDP = "ddp"

FSDP_C = (FSDP_C_ORIG, FSDP_C_FLAT, FSDP_C_C10D, FSDP_C_FULLY)

LABELS = {
    BARE: "bare model",
    FSDP_C_ORIG: "fsdp_c, use_orig_params=True",
    FSDP_C_FLAT: "fsdp_c, use_orig_params=False",
    FSDP_C_C10D: "fsdp_c, use_orig_params=True, FSDP_C_TRANSPORT=c10d",
    FSDP_C_FULLY: "fsdp_c, fully_shard",
    FSDP1_ORIG: "torch FSDP1, use_orig_params=True",
    FSDP1_FLAT: "torch FSDP1, use_orig_params=False",
    FSDP2: "torch FSDP2 (fully_shard)",
    DDP: "torch DDP",
}

# The classes and functions behind them.
_APIS = {
    FSDP_C_ORIG: bench.OURS,
    FSDP_C_FLAT: bench.OURS,
    FSDP_C_C10D: bench.OURS,
    FSDP_C_FULLY: bench.OURS_FULLY,
    FSDP1_ORIG: bench.FSDP1,
    FSDP1_FLAT: bench.FSDP1,
    FSDP2: bench.FSDP2,
    DDP: bench.DDP,
}

NUM_BYTES = 256


def parallelise(
    model: nn.Module,
    implementation: str,
    mesh: DeviceMesh | None = None,
    param_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return ``model``, sharded on the CPU with one unit per ``Block``.

    Args:
        model: It is used up.
        implementation: A key of ``LABELS``.
        mesh: (replicate, shard): HYBRID_SHARD; None: the default process group.
        param_dtype: Of forward and backward; gradients are reduced in fp32. None:
            that of the parameters.
    """
    if implementation == BARE:
        return model
    if implementation == FSDP_C_C10D:
        os.environ["FSDP_C_TRANSPORT"] = "c10d"  # gloo's own collectives
    return bench.parallelise(
        model,
        _APIS[implementation],
        torch.device("cpu"),
        param_dtype=param_dtype,
        reduce_dtype=None if param_dtype is None else torch.float32,
        mesh=mesh,
        use_orig_params=implementation not in (FSDP_C_FLAT, FSDP1_FLAT),
    )
