"""FullyShardedDataParallel: FSDP1's class, executed by fsdp_c._native."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)

from fsdp_c._engines.engine import ensure_engine
from fsdp_c._engines.summon import summon_full_params, summoned
from fsdp_c._fsdp1 import torch_dispatch
from fsdp_c._fsdp1.conversion import convert
from fsdp_c._fsdp1.copy import Copying
from fsdp_c._fsdp1.forward_methods import run_forward_method
from fsdp_c._fsdp1.gradients import GradientMethods
from fsdp_c._fsdp1.torch_class import TorchClass
from fsdp_c._state import kinds
from fsdp_c._state.model import load, save
from fsdp_c._state.optim.methods import OptimStateMethods
from fsdp_c._torch_compat import Policy, TrainingState, interpreted
from fsdp_c._units.base import sharded_modules
from fsdp_c._units.build import build_unit
from fsdp_c._units.config import DEFAULTS, make_config
from fsdp_c._units.device import choose_device
from fsdp_c._units.foreign_groups import as_given
from fsdp_c._units.ignored import find_ignored
from fsdp_c._units.names import WRAPPED_MODULE, clean_name
from fsdp_c._units.params import check_params, unsharded_params
from fsdp_c._units.wrap import auto_wrap


class FullyShardedDataParallel(OptimStateMethods, GradientMethods, TorchClass):
    """Shards a module's parameters, gradients and optimizer state over ranks.

    The interface is that of ``torch.distributed.fsdp.FullyShardedDataParallel``
    (torch 2.13): same arguments, names of children and parameters, state dict
    keys. Parameters keep their identity; ``parameters()`` yields the same objects
    for the whole run. Between steps they are 1-D views of this rank's shard
    (``use_orig_params=True``), or one FlatParameter per trainable or frozen
    segment stands for them (``use_orig_params=False``): then they have their whole
    shapes between steps, and no memory.

    Args:
        module: The module to wrap.
        process_group: The group to shard over; the default group if None. For
            HYBRID_SHARD a tuple ``(shard_group, replica_group)``, or None to shard
            over this node's ranks and replicate over the nodes.
        sharding_strategy: FULL_SHARD if None.
        cpu_offload: Keep shards and gradients in host memory. On the CPU they
            are there anyway.
        auto_wrap_policy: Decides which modules inside become units of their own: a
            torch policy object, or a callable
            ``policy(module=, recurse=, nonwrapped_numel=)``.
        backward_prefetch: When to gather the next unit in backward.
        mixed_precision: dtypes of parameters, gradient reduction, buffers, inputs.
        ignored_modules: Modules to leave alone, with all in them.
        param_init_fn: Gives a module with meta parameters real ones.
        device_id: The device to compute on: an int, str or torch.device. If None,
            where the parameters are; for parameters on the CPU, the current
            accelerator if the group has a backend of its own for it.
        sync_module_states: Broadcast rank 0's parameters and buffers at first.
        forward_prefetch: Gather the next unit early in forward as well.
        limit_all_gathers: No effect: unsharded memory is always bounded, and the
            host never blocked for it.
        use_orig_params: Keep the original parameters registered.
        ignored_states: Modules, or parameters, to leave alone.
        device_mesh: Instead of process_group: 1-D, or for HYBRID_SHARD 2-D
            ``(replicate, shard)``.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument has a wrong value or is not available in this
            version; or a parameter cannot be sharded.

    Source:
        ``torch.distributed.fsdp.FullyShardedDataParallel`` (torch 2.13).
    """

    # For is_fsdp_managed_module() in Hugging Face transformers.
    _is_fsdp_managed_module = True

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., bool] | Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        given = locals()
        arguments = {name: given[name] for name in DEFAULTS}
        torch_dispatch.begin(type(self), module)
        self._construct(module, arguments)

    def _construct(
        self,
        module: nn.Module,
        arguments: Mapping[str, Any],
        name: str = "",
        left_out: frozenset[nn.Parameter] = frozenset(),
    ) -> None:
        """Wrap ``module``; the checks come before anything is changed."""
        nn.Module.__init__(self)
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be an nn.Module, got {module!r}")
        config = make_config(arguments)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            warnings.warn(
                "FSDP will not all-gather parameters for containers that do not "
                f"implement forward: {type(module).__name__}; wrap its children "
                "instead",
                stacklevel=3,
            )
        ignored = find_ignored(module, config)
        params = list(unsharded_params(module, ignored.params))
        check_params(module, params, config.device_mesh)
        group = config.groups.process_group
        device = choose_device(
            config.device_id,
            params,
            (unit.compute_device for unit in self.fsdp_modules(module)),
            group,
        )
        for_children = {**arguments, "device_id": device}
        auto_wrap(module, config, for_children, ignored, self._make)

        sharded = build_unit(
            module,
            config,
            ignored,
            device,
            name=name or type(module).__name__,
            left_out=left_out,
        )
        self.process_group = as_given(group)
        self.rank = group.rank()
        self.world_size = group.size()
        self.compute_device = device
        self.sharding_strategy = config.sharding_strategy
        self.mixed_precision = config.mixed_precision
        self.cpu_offload = config.cpu_offload
        self.backward_prefetch = config.backward_prefetch
        self.forward_prefetch = config.forward_prefetch
        self.limit_all_gathers = config.limit_all_gathers
        self._use_orig_params = self._fsdp_use_orig_params = config.use_orig_params
        self.adopt_module(module, sharded)
        add_post_hook: Callable[[Callable[..., None]], object] = (
            self.register_load_state_dict_post_hook
        )
        add_post_hook(load.finish_load)

    @staticmethod
    def _make(*arguments: Any) -> "FullyShardedDataParallel":
        """Wrap a module that a policy chose; with the arguments of _construct()."""
        wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
        wrapped._construct(*arguments)
        return wrapped

    # Running ---------------------------------------------------------------

    @interpreted
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with whole parameters.

        Raises:
            RuntimeError: A step with another engine is not finished, or a
                collective failed; see ``fsdp_c.reset``.
        """
        if self._running is None:
            ensure_engine(self)
        wrapped: Any = self._modules[WRAPPED_MODULE]
        sharded = self._sharded
        if sharded.originals.listeners:
            wrapped = partial(sharded.originals.call_announced, wrapped)
        return sharded.unit.forward(wrapped, args, kwargs)

    def train(self, mode: bool = True) -> "FullyShardedDataParallel":
        """Set the mode.

        With ``FSDP_USE_FULL_PREC_IN_EVAL=1`` parameters, inputs and buffers are not
        cast in eval mode. Gradients of an eval forward are then rounded to param_dtype
        all the same, once a training forward has run.
        """
        super().train(mode)
        sharded = self._sharded
        sharded.unit.full_precision = sharded.config.full_precision_in_eval and not mode
        sharded.buffers.follow(is_training=mode)
        return self

    # Whole parameters ------------------------------------------------------

    summon_full_params = staticmethod(summon_full_params)

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """Apply ``fn`` to all modules, with the whole parameters of their unit.

        What ``fn`` writes is kept; it must write the same on all ranks.

        Raises:
            ValueError: Inside forward, backward or summon_full_params.
        """
        self._assert_state(TrainingState.IDLE)
        ensure_engine(self)
        with summoned(self, writeback=True, as_dtensors=True):
            super().apply(fn)
        return self

    def named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by name; the names are clean inside a summon."""
        for each in sharded_modules(self):
            each._sharded.originals.hide_again()
        is_clean = self._sharded.unit.is_summoned
        for name, param in super().named_parameters(*args, **kwargs):
            yield (clean_name(name) if is_clean else name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers by name; the names are clean inside a summon."""
        is_clean = self._sharded.unit.is_summoned
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (clean_name(name) if is_clean else name), buffer

    # State dicts -----------------------------------------------------------

    set_state_dict_type = staticmethod(kinds.set_state_dict_type)
    get_state_dict_type = staticmethod(kinds.get_state_dict_type)
    state_dict_type = staticmethod(kinds.state_dict_type)

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the state dict, of the kind that :meth:`set_state_dict_type` says.

        FULL and SHARDED have the keys of the unwrapped model in its order. One unit is
        gathered at a time, however they are nested; all ranks must call it, also with
        ``rank0_only``. Parameters own their memory; buffers and ignored parameters
        are the module's, as in ``nn.Module.state_dict()``. So are the slices that
        LOCAL has with ``use_orig_params=True``.

        Raises:
            RuntimeError: Inside forward or backward; a parameter was replaced, or is
                shared with a module outside; LOCAL_STATE_DICT with a device mesh.
        """
        given = (*args, *(destination, prefix, keep_vars)[len(args) :])
        return save.save(self, *given)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy a state dict of the kind that is set into the shards.

        All ranks must call it: with the whole state dict (FULL), or with what they
        saved (SHARDED, LOCAL). SHARDED communicates once a unit, the others not at all,
        but for units whose modules have loading of their own.

        Args:
            state_dict: By the keys of the unwrapped module.
            strict: Keys that only one side has are an error.
            assign: Not supported: a shard cannot be another tensor.

        Returns:
            The missing and the unexpected keys, as ``nn.Module.load_state_dict``,
            under their names in the unwrapped module.

        Raises:
            RuntimeError: A parameter's value is of the wrong shape or kind; nothing was
                loaded. Or, with ``strict``, keys are missing or unexpected; what fits
                was loaded.
            ValueError: ``assign=True``.
        """
        try:
            return super().load_state_dict(
                load.with_wrapped_metadata(self, state_dict), strict, assign
            )
        finally:
            for module in sharded_modules(self):
                module.end_state_dict_load()

    def _load_from_state_dict(self, *args: Any) -> None:
        state_dict, prefix, local_metadata, _, missing_keys, _, error_msgs = args
        load.begin_load(
            self, state_dict, prefix, local_metadata, missing_keys, error_msgs
        )
        super()._load_from_state_dict(*args)

    # Looking at it ---------------------------------------------------------

    @staticmethod
    def fsdp_modules(
        module: nn.Module, root_only: bool = False
    ) -> list["FullyShardedDataParallel"]:
        """Return the wrapped modules in ``module``, itself included, parents first.

        Args:
            module: Any module.
            root_only: Only those that are not inside another one's engine.
        """
        found = [
            each
            for each in sharded_modules(module)
            if isinstance(each, FullyShardedDataParallel)
        ]
        return [each for each in found if each.check_is_root()] if root_only else found

    def __getattr__(self, name: str) -> Any:
        """Look missing attributes up in the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if WRAPPED_MODULE not in modules:
                raise
        value = getattr(modules[WRAPPED_MODULE], name)
        if name in self._forward_methods:
            return partial(run_forward_method, self, value)
        return value

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module, as an ``nn.Sequential``."""
        wrapped: Any = self.wrapped
        return wrapped[key]

    # Conversion and copies -------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Convert parameters and buffers, for ``to()``, ``half()``, ``cuda()``.

        All ranks must call it, between steps and without gradients.

        Raises:
            RuntimeError: A unit has gradients, or is inside a step.
        """
        convert(self, fn, recurse=recurse)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let ``copy.deepcopy`` make a copy with its own shards, without gradients.

        Between steps. Not by ``__deepcopy__``: wrappers that look missing attributes up
        in the module inside would have it, and the copy would lack them.

        Raises:
            TypeError: What calls this pickles, or copies shallowly.
        """
        return Copying.made, (Copying(self),)
