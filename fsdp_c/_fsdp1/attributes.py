"""FSDP1's attributes of a wrapped module, for users and tools to read."""

from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp.api import ShardingStrategy

from fsdp_c._engines.away import move_shard
from fsdp_c._engines.engine import ensure_engine
from fsdp_c._engines.flat_views import flat_views
from fsdp_c._fsdp1.conversion import convert
from fsdp_c._torch_compat import (
    CHECKPOINT_WRAPPED_MODULE,
    ActivationWrapper,
    FlatParamShardMetadata,
    FreeEventQueue,
    FSDPDeviceHandle,
    TrainingState,
)
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.originals import FlatParameter
from fsdp_c._units.owner import UnitFacts
from fsdp_c._units.params import own_modules


class FlatParamHandle:
    """FSDP1's ``_handle`` of a unit, to read; the native engine runs the unit."""

    def __init__(self, module: "Attributes", flat_param: FlatParameter) -> None:
        self._module = module
        self.flat_param = flat_param  # stands for the unit; whole in a summon
        self.rank, self.world_size = module.shard_rank, flat_param._world_size

    @property
    def uses_sharded_strategy(self) -> bool:
        """Whether parameters are sharded: not with NO_SHARD."""
        return self._module._sharded.groups.shard_group is not None

    @property
    def _fwd_bwd_param_dtype(self) -> torch.dtype:
        precision = self._module._sharded.config.mixed_precision
        return precision.param_dtype or self.flat_param.dtype

    @property
    def _reduce_dtype(self) -> torch.dtype:
        precision = self._module._sharded.config.mixed_precision
        return precision.reduce_dtype or self._fwd_bwd_param_dtype

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Return names, shapes and offsets of the parameters in this rank's shard."""
        return self.flat_param.shard_metadata()

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        if not self.uses_sharded_strategy:
            return False
        return tensor.size() == self.flat_param._sharded_size

    @property
    def sharded_grad(self) -> torch.Tensor | None:
        """This rank's part of the gradient, between steps.

        None where backward left none, or an optimizer in backward took it. With
        ``use_orig_params=True`` a copy, put together from the parameters' gradients.
        """
        originals = self._module._sharded.originals
        if originals.flat_params():
            return self.flat_param.grad
        self._check_sharded("sharded_grad")
        grads = {use.fqn: use.param.grad for use in originals.uses}
        parts = [grads[fqn] for fqn in self.flat_param._fqns]
        if all(part is None for part in parts):
            return None
        whole = torch.zeros_like(self.flat_param)
        for part, (_, _, begin, end) in zip(parts, self.flat_param._own, strict=True):
            if part is not None:
                whole[begin:end] = part.flatten()
        return whole

    def needs_unshard(self) -> bool:
        return (
            self.uses_sharded_strategy and self._module._sharded.unit.state == "SHARDED"
        )

    def _get_padded_unsharded_flat_param(self) -> torch.Tensor:
        """Return the unsharded flat parameter between steps: a tensor without memory.

        While parameters are whole, they are in blocks of the engine.
        """
        self._check_sharded("_get_padded_unsharded_flat_param")
        whole = self.flat_param.detach().new_empty(
            self.flat_param._padded_unsharded_size
        )
        whole.untyped_storage().resize_(0)
        return whole

    @property
    def _offload_params(self) -> bool:
        return bool(self._module._sharded.config.cpu_offload.offload_params)

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move this rank's shard to another device or back; see fsdp_c._engines.away.

        Args:
            args: As of ``torch.Tensor.to``.
            kwargs: Likewise.

        Raises:
            RuntimeError: Inside a step or a summon.
            ValueError: Another dtype.
        """
        params = self._module.params
        segment = next(i for i, each in enumerate(params) if each is self.flat_param)
        shard = move_shard(self._module, segment, *args, **kwargs)
        self.flat_param.data = shard

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Do nothing between steps: the engine reshards what it has unsharded."""
        self._check_sharded("reshard")

    def post_reshard(self) -> None:
        """Do nothing: mixed precision leaves no copy of the shard."""

    def unshard(self) -> NoReturn:
        """Refuse: a summon shows whole parameters."""
        raise NotImplementedError(
            f"_handle.unshard() of unit {self._module._sharded.name!r}: the engine "
            "drives units; use FullyShardedDataParallel.summon_full_params(module, "
            "recurse=False) to see whole parameters"
        )

    def _check_sharded(self, method: str) -> None:
        unit = self._module._sharded.unit
        if unit.is_summoned or unit.state != "SHARDED":
            state = "SUMMONED" if unit.is_summoned else unit.state
            raise RuntimeError(
                f"_handle.{method} of unit {unit.name!r} in state {state}: call it "
                "between steps, where units are sharded"
            )

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """The dtype of the sharded parameters; setting it converts the unit.

        All ranks must set it, between steps and without gradients. It follows
        ``flat_param.data = flat_param.data.to(dtype)``, as Hugging Face accelerate
        does both for models loaded in 16 bits that it trains in 32.
        """
        return self.flat_param.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        module = self._module
        # Registered ones only: the values that they were given go into the shards.
        flat_params = module._sharded.originals.flat_params()
        for flat_param, shard in zip(
            flat_params, module._sharded.unit.shards, strict=False
        ):
            if flat_param.dtype != shard.dtype:
                shard.copy_(flat_param.detach())
                flat_param.data = shard
        convert(module, lambda tensor: tensor.to(dtype), recurse=False)


class Attributes(ShardedModule):
    """The read-only part of FullyShardedDataParallel."""

    sharding_strategy: ShardingStrategy

    @property
    def module(self) -> nn.Module:
        """The user's module, without an activation checkpointing wrapper."""
        wrapped = self.wrapped
        if isinstance(wrapped, ActivationWrapper):
            inner = getattr(wrapped, CHECKPOINT_WRAPPED_MODULE)
            assert isinstance(inner, nn.Module)
            return inner
        return wrapped

    def check_is_root(self) -> bool:
        """Return whether this module runs as the outermost of its engine."""
        ensure_engine(self)
        return bool(self._is_root)

    @property
    def training_state(self) -> TrainingState:
        """IDLE, FORWARD_BACKWARD or SUMMON_FULL_PARAMS."""
        if self._sharded.unit.is_summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.FORWARD_BACKWARD if self.is_in_step else TrainingState.IDLE

    def _assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """Raise ValueError unless the training state is ``state``, or one of them."""
        expected = state if isinstance(state, list) else [state]
        if self.training_state not in expected:
            raise ValueError(
                f"unit {self._sharded.name!r} on rank {self.rank} is expected to be in "
                f"states {[each.name for each in expected]} but is in "
                f"{self.training_state.name}"
            )

    def _assert_idle(self, method: str) -> None:
        if self.training_state is not TrainingState.IDLE:
            raise RuntimeError(
                f"{method}() was called in state {self.training_state.name}: call it "
                "between steps; after an exception in the middle of one, call "
                "fsdp_c.reset(model) first"
            )

    def _ensure_root(self, method: str) -> None:
        ensure_engine(self)
        if not self._is_root:
            raise RuntimeError(
                f"{method} should only be called on the root FSDP instance, the "
                f"outermost one: unit {self._sharded.name!r} runs inside another"
            )

    @property
    def _has_params(self) -> bool:
        return bool(self._sharded.uses)

    @property
    def _flat_param(self) -> FlatParameter | None:
        """The first trainable segment's flat parameter, or the first one's.

        With use_orig_params it is a view.
        """
        params = self.params
        trainable = (param for param in params if param.requires_grad)
        return next(trainable, params[0] if params else None)

    @property
    def params(self) -> list[FlatParameter]:
        """This unit's flat parameters; with use_orig_params views."""
        return self._sharded.originals.flat_params() or flat_views(self)

    @property
    def _handle(self) -> FlatParamHandle | None:
        """The flat parameter, as FSDP1 shows it; None without parameters."""
        flat_param = self._flat_param
        return None if flat_param is None else FlatParamHandle(self, flat_param)

    @property
    def _all_handles(self) -> list[FlatParamHandle]:
        """One for each flat parameter of the units in this module."""
        return [
            FlatParamHandle(each, flat_param)
            for each in sharded_modules(self)
            if isinstance(each, Attributes)
            for flat_param in each.params
        ]

    @property
    def _is_root(self) -> bool | None:
        """Whether the module runs as the outermost; None until the first call.

        Programs set it before they summon a unit inside. It changes nothing: which
        module is called decides.
        """
        return super()._is_root

    @_is_root.setter
    def _is_root(self, value: bool) -> None:
        """Nothing."""

    # What torch's _runtime_utils._reshard(module, module._handle, True) uses besides.

    @property
    def _device_handle(self) -> Any:
        """What FSDP1 has for torch.cuda, on any device."""
        return FSDPDeviceHandle.from_device(self.compute_device)

    @property
    def _free_event_queue(self) -> FreeEventQueue:
        """An empty queue, which nothing waits for."""
        return FreeEventQueue()

    @property
    def _inter_node_pg(self) -> ProcessGroup | None:
        return self._sharded.groups.inter_node_group

    def _mixed_precision_enabled_for_buffers(self) -> bool:
        return self._sharded.config.mixed_precision.buffer_dtype is not None

    def _reset_lazy_init(self) -> None:
        """Let the next call decide anew which module is the root; between steps."""
        self._assert_idle("_reset_lazy_init")
        self.release_engine()

    def unit_facts(self, name: str) -> UnitFacts:
        """Return what tools ask of the unit; ``name`` is that of its module."""
        sharded, config = self._sharded, self._sharded.config
        prefetch = config.backward_prefetch
        return UnitFacts(
            name=name,
            strategy=config.sharding_strategy.name,
            device=self.compute_device,
            shard_group=config.groups.shard_group,
            replica_group=config.groups.replica_group,
            segments=sharded.unit.segments,
            param_dtype=config.mixed_precision.param_dtype,
            reduce_dtype=config.mixed_precision.reduce_dtype,
            buffer_dtype=config.mixed_precision.buffer_dtype,
            buffer_dtypes=tuple(
                buffer.dtype
                for _, each in own_modules(self.wrapped, sharded.ignored.modules)
                for buffer in each.buffers(recurse=False)
            ),
            forward_prefetch=config.forward_prefetch,
            backward_prefetch="" if prefetch is None else prefetch.name,
        )

    def extra_repr(self) -> str:
        """Say how the module is sharded."""
        return (
            f"{self.sharding_strategy.name}, rank={self.rank}, "
            f"world_size={self.world_size}"
        )
