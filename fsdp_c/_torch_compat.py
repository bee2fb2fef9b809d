"""The only file that touches torch's private names; one place per torch version."""

import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.autograd import Variable
from torch.autograd.grad_mode import (
    _unsafe_preserve_version_counter as preserved_version,
)
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_PREFIX as CHECKPOINT_PREFIX,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_WRAPPED_MODULE as CHECKPOINT_WRAPPED_MODULE,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle as FSDPDeviceHandle
from torch.distributed.fsdp._flat_param import (
    FlatParamShardMetadata,
    ParamInfo,
    SharedParamInfo,
)
from torch.distributed.fsdp._flat_param import _ShardParamInfo as ShardParamInfo
from torch.distributed.fsdp._limiter_utils import _FreeEventQueue as FreeEventQueue
from torch.distributed.fsdp.api import ShardingStrategy
from torch.distributed.fsdp.wrap import _Policy as Policy
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Module

# torch 2.11 has no such class: isinstance() with () is False. From sys.modules, since
# torch.distributed has no attribute fsdp yet if install() runs during its import.
DataParallelMeshDims: Any = getattr(
    sys.modules["torch.distributed.fsdp"], "DataParallelMeshDims", ()
)

HYBRID_SHARD_ZERO2 = ShardingStrategy._HYBRID_SHARD_ZERO2

F = TypeVar("F", bound=Callable[..., Any])


def interpreted(function: F) -> F:
    """Let torch.compile leave ``function`` to Python, but compile what it calls.

    A compiled caller breaks its graph at the call. Does what a non-recursive
    ``torch.compiler.disable`` does, but without the seconds that importing the
    compiler takes.
    """
    return _interpreted(function, _FrameAction.DEFAULT)


def interpreted_with_callees(function: F) -> F:
    """Let torch.compile leave ``function`` and all that it calls to Python."""
    return _interpreted(function, _FrameAction.SKIP)


def _interpreted(function: F, callees: _FrameAction) -> F:
    strategy = _FrameExecStrategy(_FrameAction.SKIP, callees)
    set_code_exec_strategy(function.__code__, strategy)
    marked: Any = function  # so that a compiled caller does not inline it
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "fsdp_c gathers parameters and hooks tensors"
    return function


def replace_autograd_engine(make: Callable[[Any], Any]) -> None:
    """Let torch call ``make(engine)`` in the place of autograd's engine."""
    variable: Any = Variable
    variable._execution_engine = make(variable._execution_engine)


def outside_transforms() -> AbstractContextManager[object]:
    """Return a context in which no transform of torch.func is active."""
    context: AbstractContextManager[object] = torch._C._DisableFuncTorch()
    return context


def run_policy(
    policy: Policy, root: Module, ignored: set[Module], kwargs: dict[str, Any]
) -> dict[Module, dict[str, Any]]:
    """Return the constructor arguments of every module that ``policy`` wraps."""
    return policy._run_policy(root, ignored, kwargs)


def checkpoint_state_dict() -> Any:
    """Return torch.distributed.checkpoint.state_dict, imported when first needed."""
    return import_module("torch.distributed.checkpoint.state_dict")


def state_dict_utils() -> Any:
    """Return torch's module that shards whole tensors for checkpoint_state_dict()."""
    return import_module("torch.distributed._state_dict_utils")


def overrides_dispatch(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def note_fully_sharded(module: Module, state: Any) -> None:
    """Mark ``module`` as fully sharded for ``replicate()`` and pipeline schedules.

    ``state`` is what ``torch.distributed.fsdp.fully_shard.state(module)`` returns.
    """
    registry: Any = module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())
    registry["fully_shard"] = RegistryItem()
    states: Any = module.__dict__.setdefault(STATE_KEY, {})
    function: Any = torch_fully_shard
    states[function.__wrapped__] = state


def is_replicated(module: Module) -> bool:
    """Whether ``replicate()`` was called on it: DDP's, or that of FSDP2."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())


def noted_state(module: Module) -> Any:
    """Return what note_fully_sharded() was told; None: ``module`` is not sharded."""
    function: Any = torch_fully_shard
    return function.state(module)


def joined_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return one mesh of all dimensions.

    RuntimeError if they have no common root, TypeError if one has no names.
    """
    mesh: DeviceMesh = DeviceMesh._concatenate(meshes)
    return mesh


def flattened_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the dimensions ``names`` of ``mesh`` as one; makes a group of several."""
    if len(names) == 1:
        return mesh[names[0]]
    part: Any = mesh[names]
    flat: DeviceMesh = part._flatten("_".join(names))
    return flat


def num_parts_along(value: DTensor, dim: int) -> int:
    """Return into how many parts the ranks of its mesh cut ``value`` along ``dim``."""
    num_parts = 1
    for mesh_dim, placement in enumerate(value.placements):
        if is_cut(placement, dim):
            num_parts *= value.device_mesh.size(mesh_dim)
    return num_parts


def is_cut(placement: Placement, dim: int | None = None) -> bool:
    """Whether ``placement`` cuts, along ``dim`` if one is given."""
    if isinstance(placement, _StridedShard):
        return dim is None or placement.dim == dim
    return placement.is_shard(dim)


def is_strided(placement: Placement) -> bool:
    """Whether ``placement`` cuts what all others have left."""
    return isinstance(placement, _StridedShard)


def strided_shard(dim: int, num_parts: int) -> Placement:
    """Return the placement that cuts each of ``num_parts`` parts along ``dim``."""
    placement: Placement = _StridedShard(dim, split_factor=num_parts)
    return placement


def local_tensor(value: DTensor) -> Tensor:
    """Return the local tensor itself, where ``to_local()`` may return an alias."""
    local: Tensor = value._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the time limit of a group's collectives; None where it tells none."""
    for device in getattr(group, "_device_types", ()):
        with suppress(AttributeError, RuntimeError):  # a user's own backend
            timeout: timedelta = group._get_backend(device).options._timeout
            return timeout
    return None


def serves_host(group: dist.ProcessGroup) -> bool:
    """Return whether a group has a backend for tensors on the CPU."""
    devices = getattr(group, "_device_types", ())
    return any(device.type == "cpu" for device in devices)


def in_backward_optimizers(param: Tensor) -> list[torch.optim.Optimizer]:
    optimizers: list[torch.optim.Optimizer] = getattr(
        param, "_in_backward_optimizers", []
    )
    return optimizers


def remove_in_backward_hooks(param: Tensor) -> None:
    """Remove the hooks that step the optimizers of ``param`` in its backward.

    Also drop the autograd node of the hooks, which may hold the shape of a shard.
    """
    # torch.distributed.optim compiles TorchScript when it is imported: half a second.
    module: Any = import_module("torch.distributed.optim.apply_optimizer_in_backward")
    for handle in module.param_to_optim_hook_handle_map.pop(param, []):
        handle.remove()
    module.param_to_acc_grad_map.pop(param, None)
