"""PyTorch's FSDP1 API, and fully_shard() of FSDP2, executed natively in C.

``from fsdp_c import FullyShardedDataParallel as FSDP``, or ``fully_shard``; enums,
configs and policies are torch's own objects, re-exported. Checkpoints and tools are
imported when first used.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch  # loads the libraries that _native is linked with
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType

if dist.is_nccl_available():
    # Before any launch of the process: Note [Launch order] in csrc/nccl.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")

try:
    from fsdp_c import _native
except ImportError as error:
    raise ImportError(
        f"the native part of fsdp_c cannot be loaded with torch {torch.__version__} "
        f"({error}): build it for this torch with `pip install --no-build-isolation .` "
        "in the source directory"
    ) from error

from fsdp_c._capture.captured_step import CapturedStep, capture_step
from fsdp_c._engines.in_backward import optimizer_in_backward
from fsdp_c._engines.models import memory_stats, reset
from fsdp_c._engines.offload import offload_activations
from fsdp_c._fsdp1.forward_methods import register_forward_method
from fsdp_c._fsdp1.sharded_module import FullyShardedDataParallel
from fsdp_c._fully_shard.api import (
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fsdp_c._fully_shard.module import FSDPModule, UnshardHandle
from fsdp_c._units.keep_whole import keep_whole
from fsdp_c._units.originals import FlatParameter
from fsdp_c._whole.optimizer import WholeParameterOptimizer, whole_parameter_optimizer
from fsdp_c.integrations import install, uninstall

FSDP = FullyShardedDataParallel
__version__ = _native.build_info()["version"]

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims as DataParallelMeshDims

    from fsdp_c import checkpoint
    from fsdp_c.tools import trace
    from fsdp_c.tools.plan._explain import ModelSummary, UnitSummary, explain
else:
    # Public name: the module that has it, or that it is.
    _LATER = {
        "DataParallelMeshDims": "torch.distributed.fsdp",  # not in torch 2.11
        "ModelSummary": "fsdp_c.tools.plan._explain",
        "UnitSummary": "fsdp_c.tools.plan._explain",
        "checkpoint": "fsdp_c.checkpoint",
        "explain": "fsdp_c.tools.plan._explain",
        "trace": "fsdp_c.tools.trace",
    }

    def __getattr__(name: str) -> Any:
        """Import what is not needed to train when it is first used."""
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(_LATER[name])
        is_module = module.__name__.endswith(f".{name}")
        globals()[name] = value = module if is_module else getattr(module, name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})


if os.environ.get("FSDP_C_TRACE"):
    from fsdp_c.tools.trace import _automatic

    _automatic.install(os.environ["FSDP_C_TRACE"])

__all__ = [
    "FSDP",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CapturedStep",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModelSummary",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnitSummary",
    "UnshardHandle",
    "WholeParameterOptimizer",
    "__version__",
    "capture_step",
    "checkpoint",
    "explain",
    "fully_shard",
    "install",
    "keep_whole",
    "memory_stats",
    "offload_activations",
    "optimizer_in_backward",
    "register_forward_method",
    "register_fsdp_forward_method",
    "reset",
    "share_comm_ctx",
    "trace",
    "uninstall",
    "whole_parameter_optimizer",
]
