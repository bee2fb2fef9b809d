"""What the files of this package know about a wrapped module: its state."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.api import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictType,
)

from fsdp_c import _native
from fsdp_c._units.buffers import UnitBuffers
from fsdp_c._units.config import Config
from fsdp_c._units.names import WRAPPED_MODULE
from fsdp_c._units.originals import Originals


class KeptState(NamedTuple):
    """The state dict of one wrapped module, made before its parent's."""

    state: dict[str, Any]
    prefix: str  # of its keys


class Loading(NamedTuple):
    """One wrapped module in the middle of a load_state_dict."""

    stack: ExitStack  # what ends it
    error_msgs: list[str]  # what load_state_dict collects


class LoadTree(NamedTuple):
    """The wrapped modules of one load_state_dict."""

    modules: "tuple[ShardedModule, ...]"  # the outermost one first
    is_checked: bool  # the state dict fits all of them


class ShardedModule(nn.Module):
    """Base of FullyShardedDataParallel: the fields, without the behaviour."""

    rank: int
    world_size: int
    compute_device: torch.device
    process_group: ProcessGroup
    _config: Config
    # As given; and what stands in for it where a DTensor needs one.
    _device_mesh: DeviceMesh | None
    _group_mesh: DeviceMesh | None
    _unit: _native.Unit
    # Of the module tree; made by the first call, see fsdp_c._engines.engine.
    _engine: _native.Engine | None
    _is_root: bool | None
    # The modules whose units are in the engine.
    _engine_members: "WeakSet[ShardedModule]"
    _originals: Originals
    # What register_comm_hook was given; FSDP1's names.
    _comm_hook: Callable[..., Any] | None
    _comm_hook_state: Any
    # Runs after each reduction of the unit; see fsdp_c._engines.optimizer_in_backward.
    _follower: Callable[[], object] | None
    # With mixed_precision.buffer_dtype.
    _unit_buffers: UnitBuffers | None
    # Names of methods that run like forward, see fsdp_c._engines.forward_methods.
    _forward_methods: frozenset[str]
    _ignored_modules: frozenset[nn.Module]
    _ignored_params: frozenset[nn.Parameter]
    _state_dict_type: StateDictType
    _state_dict_config: StateDictConfig
    _optim_state_dict_config: OptimStateDictConfig
    # Inside state_dict() of a module that contains this one: what it gives out.
    _kept_state: KeptState | None
    # Between the start and the end of a load_state_dict.
    _loading: Loading | None
    # Meanwhile, the same for all wrapped modules of that call.
    _load_tree: LoadTree | None
    # Inside summon_full_params: names of parameters and buffers are clean.
    _shows_clean_names: bool

    def adopt_unit(self, unit: _native.Unit) -> None:
        """Make ``unit`` the native unit of this module."""
        self._unit = unit
        unit.full_precision = (
            self._config.full_precision_in_eval and not self.wrapped.training
        )
        if self._comm_hook is not None:
            unit.set_reduce_hook(self._comm_hook_state, self._comm_hook)
        if self._follower is not None:
            self.follow_reductions(self._follower)

    def follow_reductions(self, function: Callable[[], object]) -> None:
        """Let an optimizer's ``function()`` run when the unit has been reduced."""
        owner = weakref.ref(self)  # the function may lead back to the module

        def run() -> None:
            module = owner()
            if module is not None and module._follower is not None:
                module._follower()

        self._follower = function
        self._unit.follow_reductions(run)

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer steps the unit in backward."""
        return self._follower is not None

    @property
    def wrapped(self) -> nn.Module:
        """The registered child: the user's module, or a wrapper around it."""
        module = self._modules[WRAPPED_MODULE]
        assert module is not None
        return module

    @property
    def shard_rank(self) -> int:
        """This rank in the sharding group; 0 where nothing is sharded."""
        group = self._config.groups.shard_group
        return 0 if group is None else group.rank()

    @property
    def is_first_in_shard_group(self) -> bool:
        """Whether this rank is the one that a rank0_only summon shows."""
        return self.shard_rank == 0

    def end_load(self) -> None:
        """End an unfinished load_state_dict: keep what was loaded."""
        self._load_tree = None
        if self._loading is not None:
            stack = self._loading.stack
            self._loading = None
            stack.close()


def sharded_modules(module: nn.Module) -> Iterator[ShardedModule]:
    """Yield the wrapped modules in ``module``, itself included, parents first."""
    for submodule in module.modules():
        if isinstance(submodule, ShardedModule):
            yield submodule
