"""accelerate's AcceleratorState: FSDP for processes on the CPU.

Seen in accelerate 1.15.0, ``state.py``: only processes with accelerators may become
FSDP processes. On the CPU the plugin is dropped without a word and DDP runs.
``accelerate launch`` does not tell FSDP processes that the configuration says
``use_cpu``: without an accelerator each of them would train alone.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from fsdp_c.integrations.huggingface._accelerate_plugin import materialize_on_cpu
from fsdp_c.integrations.huggingface._accelerate_settings import accelerate_setting
from fsdp_c.integrations.huggingface._patch import (
    Function,
    IntegrationWarning,
    Patch,
)

ONE_PROCESS = (
    "FSDP is configured and there is only one process: accelerate trains without "
    "FSDP. Start several, as `torchrun --nproc-per-node 2 ...` or `accelerate launch "
    "--num_processes 2 ...`"
)


def _use_fsdp(state: Any, plugin: Any, names: Mapping[str, Any]) -> None:
    """Make a state of CPU processes what accelerate makes one of GPU processes.

    ``names`` are those of accelerate's module.
    """
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    if plugin.sync_module_states:
        plugin.param_init_fn = materialize_on_cpu
    state.fsdp_plugin = plugin
    kind = names["DistributedType"].FSDP
    state.distributed_type = kind
    # Later states take it from there.
    names["PartialState"]._shared_state["distributed_type"] = kind


def _are_on_cpu() -> bool:
    """Return whether a launcher started several processes without an accelerator."""
    is_launched = int(accelerate_setting("LOCAL_RANK", "-1")) >= 0
    num_processes = int(accelerate_setting("WORLD_SIZE", "1"))
    return is_launched and num_processes > 1 and not torch.accelerator.is_available()


def _wrap_init(original: Function) -> Function:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and "cpu" in kwargs and _are_on_cpu():
            kwargs["cpu"] = True
        original(self, *args, **kwargs)
        if plugin is None or getattr(self, "fsdp_plugin", None) is not None:
            return
        kind = self.distributed_type.value
        if kind == "MULTI_CPU":
            _use_fsdp(self, plugin, original.__globals__)
        elif kind == "NO":
            warnings.warn(ONE_PROCESS, IntegrationWarning, stacklevel=3)

    return init


PATCHES = (
    Patch(
        module="accelerate.state",
        function="AcceleratorState.__init__",
        purpose="FSDP on the CPU, where accelerate runs DDP without saying so",
        parameters=frozenset({"self", "fsdp_plugin", "_from_accelerator"}),
        mentions=frozenset(
            {"distributed_type", "fsdp_plugin", "set_mixed_precision", "MULTI_GPU"}
        ),
        wrap=_wrap_init,
    ),
)
