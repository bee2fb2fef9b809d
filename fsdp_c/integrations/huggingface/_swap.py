"""What is exchanged while installed: torch's class and the functions of others."""

import sys
from collections.abc import Callable
from types import ModuleType

from torch.distributed.fsdp import fully_sharded_data_parallel as torch_module

from fsdp_c._sharded_module import FullyShardedDataParallel
from fsdp_c.integrations._import_hook import ImportHook
from fsdp_c.integrations.huggingface import (
    _accelerate_optimizer,
    _accelerate_plugin,
    _accelerate_state,
    _peft_adapters,
    _trainer_arguments,
    _trainer_loss,
    _transformers_loading,
)
from fsdp_c.integrations.huggingface._origin import comes_from_fsdp_c
from fsdp_c.integrations.huggingface._patch import Applied, Patch
from fsdp_c.integrations.huggingface._rebind import Rebinding

PATCHES: tuple[Patch, ...] = (
    *_accelerate_plugin.PATCHES,
    *_accelerate_state.PATCHES,
    *_accelerate_optimizer.PATCHES,
    *_peft_adapters.PATCHES,
    *_trainer_arguments.PATCHES,
    *_trainer_loss.PATCHES,
    *_transformers_loading.PATCHES,
)

# It asks torch's class for more than its interface: with fsdp_c's in its place it
# raises "Expected a fsdp_state"; with torch's it takes a wrapped model as any module.
LEFT_ALONE = frozenset({"torch.distributed.checkpoint.state_dict"})


class Swap:
    """Everything that one installation changed.

    Patches of modules that are imported already are applied at once, those of
    others when they have been imported: the order does not matter, and nothing is
    imported for it.
    """

    def __init__(self) -> None:
        self._applied: list[Applied] = []
        self._class = Rebinding(
            torch_module.FullyShardedDataParallel,
            FullyShardedDataParallel,
            keeps=comes_from_fsdp_c,
            left_alone=LEFT_ALONE,
        )
        names = {patch.module for patch in PATCHES}
        after: dict[str, Callable[[ModuleType], None]] = {
            **dict.fromkeys(names, self._apply),
            **dict.fromkeys(LEFT_ALONE, lambda _: self.settle()),
        }
        self._hook = ImportHook(after=after)
        self._hook.add()
        for name in names:
            module = sys.modules.get(name)
            if module is not None:
                self._apply(module)

    def _apply(self, module: ModuleType) -> None:
        for patch in PATCHES:
            if patch.module == module.__name__:
                applied = patch.apply(module)
                if applied is not None:
                    self._applied.append(applied)

    def settle(self) -> None:
        """Give torch's class back to modules that need it and took the other one."""
        self._class.settle()

    def undo(self) -> None:
        """Put everything back."""
        self._hook.remove()
        while self._applied:
            self._applied.pop().undo()
        self._class.undo()
