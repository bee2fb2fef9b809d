"""accelerate's FullyShardedDataParallelPlugin: version, strategy, no accelerator.

Seen in accelerate 1.15.0, ``utils/dataclasses.py``:

* Version 2 is torch's ``fully_shard``, which fsdp_c does not replace: refused.
* A strategy given as ``reshard_after_forward`` never takes effect: the plugin first
  fills ``sharding_strategy`` with FULL_SHARD, which is then preferred.
* ``sync_module_states`` (also by ``cpu_ram_efficient_loading``) raises RuntimeError
  without an accelerator; fsdp_c broadcasts on the CPU as well.
"""

from typing import Any

import torch
from torch.distributed.fsdp.api import ShardingStrategy

from fsdp_c.integrations.huggingface._accelerate_settings import (
    accelerate_setting,
    is_on,
)
from fsdp_c.integrations.huggingface._patch import Function, Patch

VERSION_2 = (
    "fsdp_c runs FSDP version 1 and this configuration asks for version 2, "
    "torch's fully_shard: set {keys}; or call "
    "fsdp_c.integrations.huggingface.uninstall() first to run version 2"
)
PLUGIN_KEYS = (
    'fsdp_config={"version": 1, ...} in TrainingArguments, fsdp_version: 1 in the '
    "YAML of accelerate, --fsdp_version 1 for accelerate launch, or fsdp_version=1 in "
    "FullyShardedDataParallelPlugin"
)


def strategy_named(value: object) -> ShardingStrategy | None:
    """Return the strategy that accelerate means by a name, a number or a strategy."""
    if isinstance(value, ShardingStrategy):
        return value
    text = str(value).upper()
    if text.isdigit():
        numbers = {strategy.value: strategy for strategy in ShardingStrategy}
        return numbers.get(int(text))
    names = {strategy.name.lstrip("_"): strategy for strategy in ShardingStrategy}
    return names.get(text.lstrip("_"))


def choose_strategy(
    sharding_strategy: object, reshard_after_forward: object
) -> ShardingStrategy | None:
    """Return the strategy that two spellings of it ask for; None where neither does.

    Raises:
        ValueError: They ask for different ones.
    """
    given = {
        "sharding_strategy": sharding_strategy,
        "reshard_after_forward": reshard_after_forward,
    }
    found = {
        key: strategy
        for key, value in given.items()
        if value is not None and (strategy := strategy_named(value)) is not None
    }
    if len(set(found.values())) > 1:
        raise ValueError(
            "sharding_strategy asks for "
            f"{found['sharding_strategy'].name} and reshard_after_forward for "
            f"{found['reshard_after_forward'].name}: they mean the same, set only one"
        )
    return next(iter(found.values()), None)


def strategy_of_environment() -> ShardingStrategy | None:
    """Return the strategy that ``accelerate launch`` passes on, if it does.

    It always sets both variables: FULL_SHARD and true are its defaults.

    Raises:
        ValueError: They ask for different strategies, or one is no strategy.
    """
    sharding = accelerate_setting("FSDP_SHARDING_STRATEGY")
    reshard = accelerate_setting("FSDP_RESHARD_AFTER_FORWARD")
    if reshard.lower() == "false":
        raise ValueError(
            "fsdp_reshard_after_forward is false, which only version 2 knows: with "
            "version 1 name a strategy, as fsdp_reshard_after_forward: SHARD_GRAD_OP"
        )
    if reshard.lower() in {"", "true"}:
        return strategy_named(sharding)
    if strategy_named(sharding) is ShardingStrategy.FULL_SHARD:
        sharding = ""
    return choose_strategy(sharding or None, reshard)


def materialize_on_cpu(module: torch.nn.Module) -> torch.nn.Module:
    """Give a module with meta parameters uninitialised ones on the CPU."""
    return module.to_empty(device="cpu", recurse=False)


def _wrap_post_init(original: Function) -> Function:
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        sharding, reshard = self.sharding_strategy, self.reshard_after_forward
        version = self.fsdp_version
        if version is None:
            version = accelerate_setting("FSDP_VERSION", "1")
        if int(version) == 2:
            raise ValueError(VERSION_2.format(keys=PLUGIN_KEYS))
        try:
            original(self, *args, **kwargs)
        except RuntimeError:
            # The last thing it does is to look for a device to broadcast on.
            if not self.sync_module_states or torch.accelerator.is_available():
                raise
            self.param_init_fn = materialize_on_cpu
        if self.sync_module_states and is_on("ACCELERATE_USE_CPU"):
            self.param_init_fn = materialize_on_cpu
        strategy = choose_strategy(sharding, reshard)
        if strategy is None and sharding is None:
            strategy = strategy_of_environment()
        if strategy is not None:
            self.sharding_strategy = strategy

    return post_init


PATCHES = (
    Patch(
        module="accelerate.utils.dataclasses",
        function="FullyShardedDataParallelPlugin.__post_init__",
        purpose=(
            "version 2 is refused, reshard_after_forward takes effect, "
            "sync_module_states works without an accelerator"
        ),
        parameters=frozenset({"self"}),
        mentions=frozenset(
            {
                "fsdp_version",
                "sharding_strategy",
                "reshard_after_forward",
                "sync_module_states",
                "param_init_fn",
                "SHARDING_STRATEGY",
                "VERSION",
            }
        ),
        wrap=_wrap_post_init,
    ),
)
