"""accelerate's AcceleratorState: FSDP for processes on the CPU.

Seen in accelerate 1.15.0, ``state.py``: only processes with accelerators may become
FSDP processes. On the CPU accelerate ignores the plugin silently and runs DDP.
``accelerate launch`` does not pass ``use_cpu`` to FSDP processes: without an
accelerator they make no process group, and each rank trains alone.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from fsdp_c.integrations._patch import Function, IntegrationWarning, Patch
from fsdp_c.integrations.huggingface._accelerate_plugin import materialize_on_cpu
from fsdp_c.integrations.huggingface._accelerate_settings import are_on_cpu, is_on

ONE_PROCESS = (
    "FSDP is configured, but there is only one process: accelerate trains without "
    "FSDP. Start several, for example with `torchrun --nproc-per-node 2 ...` or "
    "`accelerate launch --num_processes 2 ...`"
)

NO_GROUP = (
    "FSDP is configured, but accelerate makes no process group for the processes that "
    "were started: each would train alone. There is no accelerator here: pass "
    "use_cpu=True to TrainingArguments or cpu=True to Accelerator, before anything "
    "else of accelerate is made"
)


def _use_fsdp(state: Any, plugin: Any, names: Mapping[str, Any]) -> None:
    """Set up the state of CPU processes as accelerate sets up that of GPU processes.

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


def _wrap_prepare(original: Function) -> Function:
    def prepare_backend(
        self: Any, cpu: bool = False, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        backend, kind = original(self, cpu, *args, **kwargs)
        if backend is None and is_on("ACCELERATE_USE_FSDP") and are_on_cpu():
            self._cpu = True
            backend, kind = original(self, True, *args, **kwargs)
        return backend, kind

    return prepare_backend


def _wrap_init(original: Function) -> Function:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and "cpu" in kwargs and are_on_cpu():
            kwargs["cpu"] = True
        original(self, *args, **kwargs)
        if plugin is None or getattr(self, "fsdp_plugin", None) is not None:
            return
        kind = self.distributed_type.value
        if kind == "MULTI_CPU":
            _use_fsdp(self, plugin, original.__globals__)
        elif kind == "NO" and are_on_cpu():
            raise RuntimeError(NO_GROUP)
        elif kind == "NO":
            warnings.warn(ONE_PROCESS, IntegrationWarning, stacklevel=3)

    return init


PATCHES = (
    Patch(
        module="accelerate.state",
        function="PartialState._prepare_backend",
        purpose="processes of accelerate launch on the CPU make one group",
        parameters="self cpu",
        mentions="LOCAL_RANK MULTI_CPU backend",
        wrap=_wrap_prepare,
    ),
    Patch(
        module="accelerate.state",
        function="AcceleratorState.__init__",
        purpose="FSDP on the CPU, where accelerate runs DDP without saying so",
        parameters="self fsdp_plugin _from_accelerator",
        mentions="distributed_type fsdp_plugin set_mixed_precision MULTI_GPU",
        wrap=_wrap_init,
    ),
)
