"""The model that the benchmarks train and the ways in which it is parallelised."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

FSDP_C_IMPORT_ERROR = ""
try:
    from fsdp_c import FullyShardedDataParallel as NativeFullyShardedDataParallel
    from fsdp_c import fully_shard as native_fully_shard
except ImportError as error:
    FSDP_C_IMPORT_ERROR = str(error)

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
    FSDP_C_C10D: "fsdp_c, use_orig_params=True, FSDP_C_SHM=0",
    FSDP_C_FULLY: "fsdp_c, fully_shard",
    FSDP1_ORIG: "torch FSDP1, use_orig_params=True",
    FSDP1_FLAT: "torch FSDP1, use_orig_params=False",
    FSDP2: "torch FSDP2 (fully_shard)",
    DDP: "torch DDP",
}

NUM_BYTES = 256


class Block(nn.Module):
    """A transformer block of exactly 16 parameters: 8 weights and 8 biases."""

    recomputes = False  # activation checkpointing of all but the input

    def __init__(self, width: int, num_heads: int) -> None:
        """Create the four projections of attention, the MLP and two norms."""
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` of shape [B, T, width] to the same shape."""
        if not self.recomputes:
            return self._compute(x)
        out: Tensor = checkpoint(self._compute, x, use_reentrant=False)
        return out

    def _compute(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        normed = self.norm_attention(x)
        q, k, v = (
            project(normed).view(batch, time, self.num_heads, -1).transpose(1, 2)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.to_out(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm_mlp(x))))
        return out


class GPT(nn.Module):
    """Bytes in, mean loss out; the parameters outside blocks form the root unit."""

    def __init__(self, width: int, num_blocks: int, num_heads: int) -> None:
        """Create embedding, blocks, norm and head."""
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.blocks = nn.Sequential(
            *(Block(width, num_heads) for _ in range(num_blocks))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of predicting ``targets``; both int64, shape [B, T]."""
        logits = self.head(self.norm(self.blocks(self.embedding(inputs))))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def why_unavailable(implementation: str) -> str | None:
    """Return why ``implementation`` cannot run here, None if it can."""
    if implementation in FSDP_C and FSDP_C_IMPORT_ERROR:
        return f"fsdp_c cannot be imported ({FSDP_C_IMPORT_ERROR})"
    return None


def parallelise(
    model: nn.Module,
    implementation: str,
    mesh: DeviceMesh | None = None,
    param_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return ``model``, sharded with one unit per ``Block``.

    Args:
        model: On the CPU; it is used up.
        implementation: A key of ``LABELS``.
        mesh: (replicate, shard): HYBRID_SHARD; None: the default process group.
        param_dtype: Of forward and backward; gradients are reduced in fp32. None:
            that of the parameters.

    Raises:
        ValueError: ``implementation`` is none of ``LABELS``.
    """
    policy = ModuleWrapPolicy({Block})
    device = torch.device("cpu")
    strategy = ShardingStrategy.FULL_SHARD
    if mesh is not None:
        strategy = ShardingStrategy.HYBRID_SHARD
    precision = None
    if param_dtype is not None:
        precision = MixedPrecision(param_dtype, reduce_dtype=torch.float32)
    if implementation == BARE:
        return model
    if implementation in (FSDP_C_ORIG, FSDP_C_FLAT, FSDP_C_C10D):
        if implementation == FSDP_C_C10D:
            os.environ["FSDP_C_SHM"] = "0"  # gloo's own collectives
        native: nn.Module = NativeFullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            use_orig_params=implementation != FSDP_C_FLAT,
            sharding_strategy=strategy,
            device_mesh=mesh,
            device_id=device,
            mixed_precision=precision,
        )
        return native
    if implementation in (FSDP1_ORIG, FSDP1_FLAT):
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            use_orig_params=implementation == FSDP1_ORIG,
            sharding_strategy=strategy,
            device_mesh=mesh,
            device_id=device,
            mixed_precision=precision,
        )
    if implementation in (FSDP2, FSDP_C_FULLY):
        shard = fully_shard if implementation == FSDP2 else native_fully_shard
        if mesh is None:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy2 = MixedPrecisionPolicy()
        if param_dtype is not None:
            policy2 = MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32)
        for module in model.modules():
            if isinstance(module, Block):
                shard(module, mesh=mesh, mp_policy=policy2)
        shard(model, mesh=mesh, mp_policy=policy2)
        return model
    if implementation == DDP:
        return nn.parallel.DistributedDataParallel(model)
    raise ValueError(
        f"unknown implementation {implementation!r}: expected one of {list(LABELS)}"
    )
