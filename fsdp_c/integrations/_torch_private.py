"""Private functions of torch's FSDP1 that programs call on a wrapped model."""

from typing import Any

from fsdp_c._engines.engine import ensure_engine
from fsdp_c._units.base import ShardedModule
from fsdp_c.integrations._patch import Function, Patch


def _lazily_initialised(original: Function) -> Function:
    def lazy_init(state: Any, root_module: Any) -> Any:
        if not isinstance(state, ShardedModule):
            return original(state, root_module)
        ensure_engine(state)
        return state

    return lazy_init


PATCHES = (
    Patch(
        module="torch.distributed.fsdp._runtime_utils",
        function="_lazy_init",
        purpose="programs that call it before they move flat parameters (verl)",
        parameters="state root_module",
        mentions="_is_root",
        wrap=_lazily_initialised,
    ),
)
