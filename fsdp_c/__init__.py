"""PyTorch's FSDP1 API, executed natively in C.

``from fsdp_c import FullyShardedDataParallel as FSDP``; enums and configs are
torch's own objects, re-exported.
"""

import torch  # loads the libraries that _native is linked with
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

try:
    from fsdp_c import _native
except ImportError as error:
    raise ImportError(
        f"the native part of fsdp_c cannot be loaded with torch {torch.__version__} "
        f"({error}): build it for this torch with `pip install --no-build-isolation .` "
        "in the source directory"
    ) from error

from fsdp_c import checkpoint, trace
from fsdp_c._engines.engine import memory_stats, reset
from fsdp_c._engines.forward_methods import register_forward_method
from fsdp_c._engines.optimizer_in_backward import optimizer_in_backward
from fsdp_c._module.sharded_module import FullyShardedDataParallel
from fsdp_c._units.originals import FlatParameter
from fsdp_c.integrations import install, uninstall
from fsdp_c.plan._explain import ModelPlan, UnitPlan, explain
from fsdp_c.trace import _automatic

FSDP = FullyShardedDataParallel
_automatic.install()
__version__ = _native.build_info()["version"]

__all__ = [
    "FSDP",
    "BackwardPrefetch",
    "CPUOffload",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModelPlan",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnitPlan",
    "__version__",
    "checkpoint",
    "explain",
    "install",
    "memory_stats",
    "optimizer_in_backward",
    "register_forward_method",
    "reset",
    "trace",
    "uninstall",
]
