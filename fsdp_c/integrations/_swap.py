"""What is exchanged while installed: torch's names and the functions of others."""

import sys
from types import ModuleType

from torch.distributed import fsdp as torch_fsdp

from fsdp_c._fsdp1.sharded_module import FullyShardedDataParallel
from fsdp_c._fully_shard import api
from fsdp_c.integrations import _torch_private
from fsdp_c.integrations._import_hook import ImportHook
from fsdp_c.integrations._optimizer_check import OptimizerCheck
from fsdp_c.integrations._origin import comes_from_fsdp_c
from fsdp_c.integrations._patch import Applied, Patch
from fsdp_c.integrations._rebind import Rebinding
from fsdp_c.integrations.huggingface import (
    _accelerate_optimizer,
    _accelerate_plugin,
    _accelerate_state,
    _peft_adapters,
    _trainer_arguments,
    _trainer_loss,
    _transformers_loading,
)

PATCHES: tuple[Patch, ...] = (
    *_torch_private.PATCHES,
    *_accelerate_plugin.PATCHES,
    *_accelerate_state.PATCHES,
    *_accelerate_optimizer.PATCHES,
    *_peft_adapters.PATCHES,
    *_trainer_arguments.PATCHES,
    *_trainer_loss.PATCHES,
    *_transformers_loading.PATCHES,
)

# Torch's, which torch.distributed.fsdp exports under the same names. Not FSDPModule:
# ours is a subclass of torch's.
EXCHANGED = (
    FullyShardedDataParallel,
    api.fully_shard,
    api.register_fsdp_forward_method,
    api.share_comm_ctx,
)


class Swap:
    """Everything that one installation changed.

    Patches of modules that are imported already are applied at once, those of
    others when they have been imported: the order does not matter, and nothing is
    imported for it.
    """

    def __init__(self) -> None:
        self._applied: list[Applied] = []
        self._check = OptimizerCheck()
        self._rebindings = [
            Rebinding(getattr(torch_fsdp, ours.__name__), ours, comes_from_fsdp_c)
            for ours in EXCHANGED
        ]
        names = {patch.module for patch in PATCHES}
        self._hook = ImportHook(after=dict.fromkeys(names, self._apply))
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

    def undo(self) -> None:
        """Put everything back."""
        self._hook.remove()
        self._check.remove()
        while self._applied:
            self._applied.pop().undo()
        for rebinding in self._rebindings:
            rebinding.undo()
