"""The constructor's arguments, checked, as one frozen value."""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)

from fsdp_c import _native
from fsdp_c._torch_compat import Policy
from fsdp_c._units.device import device_from_id
from fsdp_c._units.groups import Groups, choose_groups

COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# The constructor's arguments after `module`, and their defaults (torch 2.13).
DEFAULTS: Mapping[str, Any] = {
    "process_group": None,
    "sharding_strategy": None,
    "cpu_offload": None,
    "auto_wrap_policy": None,
    "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
    "mixed_precision": None,
    "ignored_modules": None,
    "param_init_fn": None,
    "device_id": None,
    "sync_module_states": False,
    "forward_prefetch": False,
    "limit_all_gathers": True,
    "use_orig_params": False,
    "ignored_states": None,
    "device_mesh": None,
}

# As in FSDP1: "1" makes forward in eval mode compute in master dtypes.
FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"

# These give a unit's parameters back after forward.
RESHARDING = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)

_PREFETCHES = {
    None: _native.PREFETCH_NONE,
    BackwardPrefetch.BACKWARD_PRE: _native.PREFETCH_PRE,
    BackwardPrefetch.BACKWARD_POST: _native.PREFETCH_POST,
}


@dataclass(frozen=True)
class Config:
    """How one unit is sharded. Made by :func:`make_config` only."""

    groups: Groups
    device_mesh: DeviceMesh | None
    sharding_strategy: ShardingStrategy
    cpu_offload: CPUOffload
    auto_wrap_policy: Policy | Callable[..., bool] | None
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision
    ignored_modules: tuple[nn.Module, ...]
    ignored_params: tuple[nn.Parameter, ...]
    param_init_fn: Callable[[nn.Module], Any] | None
    device_id: torch.device | None
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    # From the environment, see FULL_PRECISION_IN_EVAL.
    full_precision_in_eval: bool

    @property
    def keeps_params(self) -> bool:
        """Whether parameters are whole between forward and backward."""
        return self.sharding_strategy not in RESHARDING

    def make_unit(
        self,
        name: str,
        params: list[nn.Parameter],
        device: torch.device,
        *,
        is_parallel: bool,
        block_numels: list[int] | None,
        like: _native.Layout | None = None,
    ) -> _native.Unit:
        """Return a unit of ``params``; ``is_parallel``: some stand for DTensors.

        ``block_numels``: see :func:`fsdp_c._units.keep_whole.block_numels`. ``like``:
        the layout that the parameters have had, which stays.
        """
        precision = self.mixed_precision
        reshards = not self.keeps_params
        shard_group = self.groups.shard_group
        # As in FSDP1, a rank that holds everything shows its own parameters after
        # forward, unless forward used DTensors in their place.
        shows_kept = not reshards and (
            is_parallel or (shard_group is not None and shard_group.size() > 1)
        )
        return _native.Unit(
            name,
            params,
            device,
            shard_group=shard_group,
            replica_group=self.groups.replica_group,
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            use_orig_params=self.use_orig_params,
            reshard_after_forward=reshards,
            shows_kept=shows_kept,
            reshard_after_backward_without_sync=reshards,
            backward_prefetch=_PREFETCHES[self.backward_prefetch],
            forward_prefetch=self.forward_prefetch,
            cast_forward_inputs=precision.cast_forward_inputs,
            cast_root_forward_inputs=precision.cast_root_forward_inputs,
            keep_low_precision_grads=precision.keep_low_precision_grads,
            offloads=self.cpu_offload.offload_params,
            block_numels=block_numels,
            like=like,
        )

    def make_layout(
        self,
        params: Sequence[tuple[int, torch.dtype, bool]],
        num_shards: int,
        *,
        is_cpu: bool,
        row_numels: Sequence[int] | None = None,
        block_numels: Sequence[int] | None = None,
    ) -> _native.Layout:
        """Return the layout that a unit of ``params`` will have; see Layout."""
        param_dtype = self.mixed_precision.param_dtype
        itemsize, aligns_params, aligns_shards = _native.choose_alignment(
            0 if param_dtype is None else param_dtype.itemsize,
            use_orig_params=self.use_orig_params,
            is_cpu=is_cpu,
            unit_nbytes=sum(numel * dtype.itemsize for numel, dtype, _ in params),
        )
        return _native.Layout(
            params,
            num_shards,
            itemsize=itemsize,
            align_params=aligns_params,
            align_shards=aligns_shards,
            row_numels=row_numels,
            block_numels=block_numels,
        )


def make_config(arguments: Mapping[str, Any]) -> Config:
    """Check the constructor's ``arguments`` (keys of DEFAULTS) and return them.

    ``sharding_strategy`` becomes NO_SHARD where the group has one rank, with a
    warning, as in FSDP1.
    """
    unknown = sorted(set(arguments) - set(DEFAULTS))
    if unknown:
        raise TypeError(
            f"unknown argument {unknown[0]!r} of FullyShardedDataParallel (from a "
            f"policy, perhaps): the arguments are {', '.join(DEFAULTS)}"
        )
    given = {**DEFAULTS, **arguments}
    strategy = _check_class(given, "sharding_strategy") or ShardingStrategy.FULL_SHARD
    groups = choose_groups(given["process_group"], given["device_mesh"], strategy)
    if groups.process_group.size() == 1 and groups.inter_node_group is None:
        if strategy is not ShardingStrategy.NO_SHARD:
            warnings.warn(
                f"FSDP is switching to use `NO_SHARD` instead of {strategy} since "
                "the world size is 1.",
                stacklevel=4,
            )
        strategy = ShardingStrategy.NO_SHARD
    modules, params = _check_ignored(given["ignored_modules"], given["ignored_states"])
    return Config(
        groups=groups,
        device_mesh=given["device_mesh"],
        sharding_strategy=strategy,
        cpu_offload=_check_class(given, "cpu_offload") or CPUOffload(),
        auto_wrap_policy=_check_policy(given["auto_wrap_policy"]),
        backward_prefetch=_check_class(given, "backward_prefetch"),
        mixed_precision=_check_mixed_precision(
            _check_class(given, "mixed_precision") or MixedPrecision()
        ),
        ignored_modules=modules,
        ignored_params=params,
        param_init_fn=_check_init_fn(given["param_init_fn"]),
        device_id=device_from_id(given["device_id"]),
        sync_module_states=_check_class(given, "sync_module_states"),
        forward_prefetch=_check_class(given, "forward_prefetch"),
        limit_all_gathers=_check_class(given, "limit_all_gathers"),
        use_orig_params=_check_class(given, "use_orig_params"),
        full_precision_in_eval=os.environ.get(FULL_PRECISION_IN_EVAL) == "1",
    )


# Argument: its class, and what to pass.
_CLASSES: Mapping[str, tuple[type, str]] = {
    "sharding_strategy": (
        ShardingStrategy,
        "ShardingStrategy.<name> with one of "
        + ", ".join(strategy.name for strategy in ShardingStrategy),
    ),
    "cpu_offload": (CPUOffload, "CPUOffload(offload_params=False), or None"),
    "backward_prefetch": (
        BackwardPrefetch,
        "BackwardPrefetch.BACKWARD_PRE, .BACKWARD_POST, or None",
    ),
    "mixed_precision": (
        MixedPrecision,
        "MixedPrecision(param_dtype=torch.bfloat16), for example",
    ),
    "sync_module_states": (bool, "True or False"),
    "forward_prefetch": (bool, "True or False"),
    "limit_all_gathers": (bool, "True or False"),
    "use_orig_params": (bool, "True or False"),
}


def _check_class(given: Mapping[str, Any], argument: str) -> Any:
    """Return the argument, which is of its class, or None unless it is a bool."""
    value = given[argument]
    cls, remedy = _CLASSES[argument]
    if not isinstance(value, cls) and (value is not None or cls is bool):
        raise TypeError(
            f"{argument} must be a {cls.__name__}, got {value!r}: pass {remedy}"
        )
    return value


def _check_policy(value: Any) -> Policy | Callable[..., bool] | None:
    if value is None or isinstance(value, Policy):
        return value
    if not callable(value) or isinstance(value, type):
        raise TypeError(
            f"auto_wrap_policy must be a policy or a callable, got {value!r}: for "
            "module classes pass ModuleWrapPolicy({Class, ...})"
        )
    return cast("Callable[..., bool]", value)


def _check_mixed_precision(value: MixedPrecision) -> MixedPrecision:
    for field in ("param_dtype", "reduce_dtype"):
        dtype = getattr(value, field)
        if dtype is not None and dtype not in COMPUTE_DTYPES:
            names = ", ".join(str(known) for known in COMPUTE_DTYPES)
            raise ValueError(
                f"mixed_precision.{field} must be None or one of {names}, got {dtype!r}"
            )
    dtype = value.buffer_dtype
    is_floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    if dtype is not None and not is_floating:
        raise ValueError(
            "mixed_precision.buffer_dtype must be None or a floating dtype such as "
            f"torch.bfloat16, got {dtype!r}: only floating buffers are cast"
        )
    return value


def _check_init_fn(value: Any) -> Callable[[nn.Module], Any] | None:
    if value is not None and not callable(value):
        raise ValueError(  # FSDP1's class and first words
            f"Expected {value!r} to be callable but got {type(value)}: param_init_fn "
            "must be a function of a module, or None"
        )
    return cast("Callable[[nn.Module], Any] | None", value)


def _check_ignored(
    ignored_modules: Any, ignored_states: Any
) -> tuple[tuple[nn.Module, ...], tuple[nn.Parameter, ...]]:
    """Return the ignored modules and parameters; one of the two is empty.

    Source:
        The checks and their messages: ``_init_ignored_module_states`` (torch 2.13,
        ``fsdp/_init_utils.py``).
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time: "
            "pass only ignored_states"
        )
    argument = "ignored_modules" if ignored_states is None else "ignored_states"
    given = ignored_modules if ignored_states is None else ignored_states
    if given is None:
        return (), ()
    if isinstance(given, nn.Module) or not isinstance(given, Iterable):
        raise TypeError(f"{argument} must be a list, got {type(given).__name__}")
    values: tuple[Any, ...] = tuple(given)
    if all(isinstance(value, nn.Module) for value in values):
        return values, ()
    types = sorted({type(value) for value in values}, key=repr)
    if ignored_states is None:
        raise ValueError(
            "ignored_modules expects nn.Module list elements but got types "
            f"{types}: pass parameters as ignored_states"
        )
    if all(isinstance(value, nn.Parameter) for value in values):
        return (), values
    raise ValueError(
        "ignored_states expects all nn.Parameter or all nn.Module list elements but "
        f"got types {types}: name the parameters of the modules instead"
    )
