"""The constructor's arguments, checked, as one frozen value."""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
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

    def make_unit(
        self, name: str, params: list[nn.Parameter], device: torch.device
    ) -> _native.Unit:
        """Return the native unit that shards ``params`` on ``device``.

        Raises:
            ValueError: A parameter cannot be sharded; the message says which.
            torch.OutOfMemoryError: The shards do not fit.
        """
        precision = self.mixed_precision
        reshards = self.sharding_strategy in RESHARDING
        return _native.Unit(
            name,
            params,
            shard_group=self.groups.shard_group,
            replica_group=self.groups.replica_group,
            device=device,
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            use_orig_params=self.use_orig_params,
            reshard_after_forward=reshards,
            reshard_after_backward_without_sync=reshards,
            backward_prefetch=_PREFETCHES[self.backward_prefetch],
            forward_prefetch=self.forward_prefetch,
            cast_forward_inputs=precision.cast_forward_inputs,
            cast_root_forward_inputs=precision.cast_root_forward_inputs,
            keep_low_precision_grads=precision.keep_low_precision_grads,
            offloads=self.cpu_offload.offload_params,
            shard_dims=None,
        )


def make_config(arguments: Mapping[str, Any]) -> Config:
    """Check the constructor's ``arguments`` (keys of DEFAULTS) and return them.

    ``sharding_strategy`` becomes NO_SHARD where the group has one rank, with a
    warning, as in FSDP1. ``limit_all_gathers`` has no effect: the arena bounds the
    unsharded memory without blocking the host either way.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument has a wrong value, or is not available in this
            version.
    """
    unknown = sorted(set(arguments) - set(DEFAULTS))
    if unknown:
        raise TypeError(
            f"unknown argument {unknown[0]!r} of FullyShardedDataParallel (from a "
            f"policy, perhaps): the arguments are {', '.join(DEFAULTS)}"
        )
    given = {**DEFAULTS, **arguments}
    strategy = _check_strategy(given["sharding_strategy"])
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
        sharding_strategy=strategy,
        cpu_offload=_check_offload(given["cpu_offload"]),
        auto_wrap_policy=_check_policy(given["auto_wrap_policy"]),
        backward_prefetch=_check_prefetch(given["backward_prefetch"]),
        mixed_precision=_check_mixed_precision(given["mixed_precision"]),
        ignored_modules=modules,
        ignored_params=params,
        param_init_fn=_check_init_fn(given["param_init_fn"]),
        device_id=device_from_id(given["device_id"]),
        sync_module_states=_check_bool(given, "sync_module_states"),
        forward_prefetch=_check_bool(given, "forward_prefetch"),
        limit_all_gathers=_check_bool(given, "limit_all_gathers"),
        use_orig_params=_check_bool(given, "use_orig_params"),
        full_precision_in_eval=os.environ.get(FULL_PRECISION_IN_EVAL) == "1",
    )


def _check_bool(given: Mapping[str, Any], argument: str) -> bool:
    value = given[argument]
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {value!r}")
    return value


def _check_strategy(value: Any) -> ShardingStrategy:
    if value is None:
        return ShardingStrategy.FULL_SHARD
    if not isinstance(value, ShardingStrategy):
        names = ", ".join(strategy.name for strategy in ShardingStrategy)
        raise TypeError(
            f"sharding_strategy must be a ShardingStrategy, got {value!r}: use "
            f"ShardingStrategy.<name> with one of {names}"
        )
    return value


def _check_offload(value: Any) -> CPUOffload:
    if value is None:
        return CPUOffload()
    if not isinstance(value, CPUOffload):
        raise TypeError(
            f"cpu_offload must be a CPUOffload, got {value!r}: pass "
            "CPUOffload(offload_params=False), or None"
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


def _check_prefetch(value: Any) -> BackwardPrefetch | None:
    if value is not None and not isinstance(value, BackwardPrefetch):
        raise TypeError(
            f"backward_prefetch must be a BackwardPrefetch or None, got {value!r}: "
            "use BackwardPrefetch.BACKWARD_PRE or .BACKWARD_POST"
        )
    return value


def _check_mixed_precision(value: Any) -> MixedPrecision:
    if value is None:
        return MixedPrecision()
    if not isinstance(value, MixedPrecision):
        raise TypeError(
            f"mixed_precision must be a MixedPrecision, got {value!r}: pass "
            "MixedPrecision(param_dtype=torch.bfloat16), for example"
        )
    for field in ("param_dtype", "reduce_dtype"):
        dtype = getattr(value, field)
        if dtype is not None and dtype not in COMPUTE_DTYPES:
            names = ", ".join(str(known) for known in COMPUTE_DTYPES)
            raise ValueError(
                f"mixed_precision.{field} must be None or one of {names}, got {dtype!r}"
            )
    _check_buffer_dtype(value.buffer_dtype)
    return value


def _check_buffer_dtype(dtype: Any) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            "mixed_precision.buffer_dtype must be None or a floating dtype such as "
            f"torch.bfloat16, got {dtype!r}: other buffers are left alone"
        )


def _check_init_fn(value: Any) -> Callable[[nn.Module], Any] | None:
    if value is not None and not callable(value):
        raise ValueError(  # FSDP1's class and first words
            f"Expected {value!r} to be callable but got {type(value)}: param_init_fn "
            "must be a function of a module, or None"
        )
    return cast("Callable[[nn.Module], Any] | None", value)


def _as_tuple(argument: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, nn.Module) or not isinstance(value, Iterable):
        raise TypeError(f"{argument} must be a list, got {type(value).__name__}")
    return tuple(value)


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
    modules = _as_tuple("ignored_modules", ignored_modules)
    states = _as_tuple("ignored_states", ignored_states)
    if not all(isinstance(module, nn.Module) for module in modules):
        raise ValueError(
            "ignored_modules expects nn.Module list elements but got types "
            f"{_types_of(modules)}: pass parameters as ignored_states"
        )
    if all(isinstance(state, nn.Module) for state in states):
        return modules or states, ()
    if all(isinstance(state, nn.Parameter) for state in states):
        return (), states
    raise ValueError(
        "ignored_states expects all nn.Parameter or all nn.Module list elements but "
        f"got types {_types_of(states)}: name the parameters of the modules instead"
    )


def _types_of(values: Iterable[Any]) -> list[type]:
    return sorted({type(value) for value in values}, key=repr)
