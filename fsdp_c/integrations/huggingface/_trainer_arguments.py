"""transformers' TrainingArguments: every key of fsdp_config has an effect.

Seen in transformers 5.23.0, ``training_args.py``, ``_process_fsdp_args``:

* ``sharding_strategy`` is not read. With version 1 the default strategy is passed on
  as if the user had set it, and would override the one given to ``accelerate launch``.
* ``offload_params`` is not read (its new name is ``cpu_offload``), and
  ``min_num_params`` has no effect unless ``auto_wrap_policy`` asks for sizes.
* ``xla`` without torch_xla fails later with an unrelated message.
"""

from importlib.util import find_spec
from typing import Any

from fsdp_c.integrations._patch import Function, Patch
from fsdp_c.integrations.huggingface._accelerate_plugin import (
    choose_strategy,
    strategy_named,
)
from fsdp_c.integrations.huggingface._accelerate_settings import are_on_cpu, is_true

NO_USE_CPU = (
    "several processes were started on a machine without an accelerator, and use_cpu "
    "is not set: they make no process group. Pass use_cpu=True to TrainingArguments"
)
SIZE_POLICY = "SIZE_BASED_WRAP"


def check_xla() -> None:
    """Check that torch_xla can be imported.

    Raises:
        ImportError: It is not installed.
    """
    if find_spec("torch_xla") is None:
        raise ImportError(
            'fsdp_config["xla"] is true, and torch_xla, whose own class then wraps '
            "the model, is not installed: install torch_xla, or remove the key to use "
            "fsdp_c"
        )


def _reshards(config: dict[str, Any]) -> bool:
    """Return what ``sharding_strategy`` means in version 2.

    Raises:
        ValueError: It has no such strategy, or ``reshard_after_forward`` differs.
    """
    strategy = strategy_named("sharding_strategy", config["sharding_strategy"])
    names = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
    if strategy is None or strategy.name not in names:
        raise ValueError(
            f"sharding_strategy is {config['sharding_strategy']!r}; with FSDP version "
            "2 it is FULL_SHARD or SHARD_GRAD_OP: set one of them, or version to 1"
        )
    reshards = names[strategy.name]
    if is_true(config.get("reshard_after_forward", reshards)) != reshards:
        raise ValueError(
            f"sharding_strategy {strategy.name} and reshard_after_forward "
            f"{config['reshard_after_forward']!r} differ: set only one"
        )
    return reshards


def complete(config: dict[str, Any], plugin: dict[str, Any]) -> None:
    """Add to ``plugin`` the settings of ``config`` that transformers does not read.

    Args:
        config: ``fsdp_config``, without prefixes.
        plugin: Arguments of accelerate's plugin.

    Raises:
        ValueError: Keys contradict each other, or a strategy is unknown or does not
            exist in this version.
    """
    if plugin["fsdp_version"] == 1:
        strategy = choose_strategy(
            config.get("sharding_strategy"), config.get("reshard_after_forward")
        )
        plugin.pop("reshard_after_forward", None)
        if strategy is not None:
            plugin["reshard_after_forward"] = strategy.name
    elif "sharding_strategy" in config:
        plugin["reshard_after_forward"] = _reshards(config)
    if is_true(config.get("offload_params", False)):
        plugin["cpu_offload"] = True
    num_params = int(config.get("min_num_params") or 0)
    if num_params > 0 and "auto_wrap_policy" not in config:
        if config.get("transformer_layer_cls_to_wrap"):
            raise ValueError(
                "fsdp_config has both min_num_params and "
                "transformer_layer_cls_to_wrap: set one of them, or auto_wrap_policy"
            )
        plugin["auto_wrap_policy"] = SIZE_POLICY
        plugin["min_num_params"] = num_params


def _wrap_process(original: Function) -> Function:
    def process_fsdp_args(self: Any) -> Any:
        plugin = original(self)
        if plugin is None:
            config = self.fsdp_config if self.fsdp else None
            if isinstance(config, dict) and config.get("xla"):
                check_xla()
            return None
        if are_on_cpu() and self.parallel_mode.name == "NOT_PARALLEL":
            raise ValueError(NO_USE_CPU)
        complete(self.fsdp_config, plugin)
        return plugin

    return process_fsdp_args


PATCHES = (
    Patch(
        module="transformers.training_args",
        function="TrainingArguments._process_fsdp_args",
        purpose=(
            "sharding_strategy, offload_params and min_num_params in fsdp_config take "
            "effect"
        ),
        parameters="self",
        mentions="fsdp_config fsdp_version reshard_after_forward xla",
        wrap=_wrap_process,
    ),
)
