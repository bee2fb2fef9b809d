"""What torch and programs ask of the FSDPState that torch keeps of a module."""

import weakref
from typing import NoReturn

from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_c._fully_shard.group import Group


class ModuleState:
    """Stands where torch has its own state of the modules of one fully_shard() call.

    After the last micro-batch a pipeline schedule asks each group to reduce what
    backwards kept, and then the root to wait. The engine does all of it at once.
    Programs read the precision. It has nothing else of torch's, and nothing can be set.

    Attributes:
        all_states: Of a schedule's view of the root: this one.
    """

    __slots__ = ("_group", "_mp_policy", "all_states")

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)
        self._mp_policy: MixedPrecisionPolicy = group.arguments.precision
        self.all_states = (self,)

    @property
    def _state_ctx(self) -> "ModuleState":
        return self

    @property
    def _fsdp_param_group(self) -> "ModuleState":
        return self

    @property
    def _fsdp_param_groups(self) -> "tuple[ModuleState, ...]":
        return (self,)

    def post_backward(self) -> None:
        """Nothing: the root does it."""

    def _root_post_backward_final_callback(self) -> None:
        group = self._group()
        if group is not None and group._running is not None:
            group._running.engine.reduce_kept()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name!r} belongs to torch's FSDPState, but fsdp_c runs this module: "
            "docs/guide/migrate.md names what there is"
        )
