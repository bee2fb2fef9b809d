"""What pipeline schedules ask a sharded stage for."""

import weakref

from fsdp_c._fully_shard.group import Group


class StageState:
    """What ``torch.distributed.pipelining`` uses of torch's own state of a stage.

    After the last micro-batch a schedule asks each group to reduce what backwards kept,
    and then the root to wait. The engine does all of it at once.
    """

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)
        self._state_ctx = self
        self.all_states = [self]
        self._fsdp_param_groups = [self]
        self._fsdp_param_group = self  # torch 2.11

    def post_backward(self) -> None:
        """Nothing: the root does it."""

    def _root_post_backward_final_callback(self) -> None:
        group = self._group()
        if group is not None and group._running is not None:
            group._running.engine.reduce_kept()
