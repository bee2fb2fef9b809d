"""accelerate's AcceleratorState: FSDP for processes on the CPU.

Seen in accelerate 1.15.0, ``state.py``: only processes with accelerators may become
FSDP processes. On the CPU the plugin is dropped without a word and DDP runs.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from fsdp_c.integrations.huggingface._accelerate_plugin import materialize_on_cpu
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


def _wrap_init(original: Function) -> Function:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
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
