"""accelerate's FullyShardedDataParallelPlugin, version 1: strategy, no accelerator.

Seen in accelerate 1.15.0, ``utils/dataclasses.py``:

* A strategy given as ``reshard_after_forward`` has no effect: the plugin sets
  ``sharding_strategy`` to FULL_SHARD first and then prefers it.
* ``sync_module_states`` (also by ``cpu_ram_efficient_loading``) raises RuntimeError
  without an accelerator; fsdp_c broadcasts on the CPU as well.
"""

from typing import Any

import torch
from torch.distributed.fsdp.api import ShardingStrategy

from fsdp_c.integrations._patch import Function, Patch
from fsdp_c.integrations.huggingface._accelerate_settings import (
    accelerate_setting,
    is_on,
)


def strategy_named(key: str, value: object) -> ShardingStrategy | None:
    """Return the strategy of a name, a number or a strategy, as accelerate reads it.

    Args:
        key: Name of the setting, for the message.
        value: None or empty for no strategy.

    Raises:
        ValueError: There is no such strategy.
    """
    if value is None or isinstance(value, ShardingStrategy):
        return value
    text = str(value).upper().lstrip("_")
    for strategy in ShardingStrategy:
        if text in {strategy.name.lstrip("_"), str(strategy.value)}:
            return strategy
    if not text:
        return None
    names = ", ".join(strategy.name.lstrip("_") for strategy in ShardingStrategy)
    raise ValueError(f"{key} is {value!r}; with FSDP version 1 it is one of {names}")


def choose_strategy(
    sharding_strategy: object, reshard_after_forward: object
) -> ShardingStrategy | None:
    """Return the strategy that the two settings name; None if neither is set.

    Raises:
        ValueError: They name different strategies, or an unknown one.
    """
    first = strategy_named("sharding_strategy", sharding_strategy)
    second = strategy_named("reshard_after_forward", reshard_after_forward)
    if first is not None and second is not None and first is not second:
        raise ValueError(
            f"sharding_strategy asks for {first.name} and reshard_after_forward for "
            f"{second.name}: with FSDP version 1 both mean the strategy, set only one"
        )
    return first or second


def strategy_of_environment() -> ShardingStrategy | None:
    """Return the strategy that ``accelerate launch`` passes on, if any.

    It always sets both variables: FULL_SHARD and true are its defaults.

    Raises:
        ValueError: They name different strategies, or an unknown one.
    """
    sharding = strategy_named(
        "FSDP_SHARDING_STRATEGY", accelerate_setting("FSDP_SHARDING_STRATEGY")
    )
    reshard = accelerate_setting("FSDP_RESHARD_AFTER_FORWARD")
    if reshard.lower() in {"", "true"}:
        return sharding
    by_reshard = strategy_named("fsdp_reshard_after_forward", reshard)
    if sharding is ShardingStrategy.FULL_SHARD:
        return by_reshard
    return choose_strategy(sharding, by_reshard)


def materialize_on_cpu(module: torch.nn.Module) -> torch.nn.Module:
    """Give a module with meta parameters uninitialised ones on the CPU."""
    return module.to_empty(device="cpu", recurse=False)


def _wrap_post_init(original: Function) -> Function:
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        sharding, reshard = self.sharding_strategy, self.reshard_after_forward
        version = self.fsdp_version
        if version is None:
            version = accelerate_setting("FSDP_VERSION", "1")
        if int(version) != 1:
            original(self, *args, **kwargs)
            return
        strategy = choose_strategy(sharding, reshard) or strategy_of_environment()
        try:
            original(self, *args, **kwargs)
        except RuntimeError:
            # The last thing it does is to look for a device to broadcast on.
            if not self.sync_module_states or torch.accelerator.is_available():
                raise
            self.param_init_fn = materialize_on_cpu
        if self.sync_module_states and is_on("ACCELERATE_USE_CPU"):
            self.param_init_fn = materialize_on_cpu
        if strategy is not None:
            self.sharding_strategy = strategy

    return post_init


PATCHES = (
    Patch(
        module="accelerate.utils.dataclasses",
        function="FullyShardedDataParallelPlugin.__post_init__",
        purpose=(
            "with version 1 reshard_after_forward takes effect, and "
            "sync_module_states works without an accelerator"
        ),
        parameters="self",
        mentions=(
            "fsdp_version sharding_strategy reshard_after_forward "
            "sync_module_states param_init_fn SHARDING_STRATEGY VERSION"
        ),
        wrap=_wrap_post_init,
    ),
)
