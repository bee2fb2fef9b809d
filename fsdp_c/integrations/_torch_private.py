"""Private functions of torch's FSDP that programs call on a wrapped model."""

from typing import Any

from fsdp_c._engines.engine import ensure_engine
from fsdp_c._fully_shard.module import FSDPModule
from fsdp_c._units.base import ShardedModule
from fsdp_c.integrations._patch import Function, Patch


def _lazily_initialised(original: Function) -> Function:
    def lazy_init(state: Any, root_module: Any) -> Any:
        if not isinstance(state, ShardedModule):
            return original(state, root_module)
        ensure_engine(state)
        return state

    return lazy_init


def _found(original: Function) -> Function:
    def get_module_fsdp_state(module: Any) -> Any:
        if not isinstance(module, FSDPModule):
            return original(module)
        return module._get_fsdp_state()

    return get_module_fsdp_state


PATCHES = (
    Patch(
        module="torch.distributed.fsdp._runtime_utils",
        function="_lazy_init",
        purpose="programs that call it before they move flat parameters (verl)",
        parameters="state root_module",
        mentions="_is_root",
        wrap=_lazily_initialised,
    ),
    Patch(
        module="torch.distributed.fsdp._fully_shard._fsdp_state",
        function="_get_module_fsdp_state",
        purpose="programs that ask whether fully_shard() was called (NeMo AutoModel)",
        parameters="module",
        mentions="FSDPState",
        wrap=_found,
    ),
)
