"""The CPython module: units and engines. Conversion only; no policy."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.distributed import ProcessGroup

PREFETCH_NONE: int
PREFETCH_PRE: int
PREFETCH_POST: int
SYNC_NONE: int
SYNC_REDUCE: int
SYNC_SHARD: int

@final
class Unit:
    """One unit: the parameters of one wrapped module, flattened and sharded."""

    def __new__(
        cls,
        name: str,
        params: Sequence[torch.Tensor],
        *,
        shard_group: ProcessGroup | None,
        replica_group: ProcessGroup | None,
        device: torch.device,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        use_orig_params: bool,
        reshard_after_forward: bool,
        reshard_after_backward_without_sync: bool,
        backward_prefetch: int,
        forward_prefetch: bool,
        cast_forward_inputs: bool,
        cast_root_forward_inputs: bool,
        keep_low_precision_grads: bool,
        offloads: bool,
    ) -> Unit: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def full_precision(self) -> bool: ...
    @full_precision.setter
    def full_precision(self, value: bool) -> None: ...
    @property
    def is_summoned(self) -> bool: ...
    @property
    def holds_grads(self) -> bool: ...
    @property
    def pending_grads(self) -> int: ...
    @property
    def param_of_use(self) -> list[int]: ...
    @property
    def slots(self) -> list[tuple[int, int, int]]:
        """Per parameter: (segment, offset, numel), in elements."""
    @property
    def segments(self) -> list[tuple[torch.dtype, bool, int, int, int, int]]:
        """Per segment: (dtype, requires_grad, num_params, unsharded_numel,
        shard_numel, padded_numel).
        """
    @property
    def shards(self) -> list[torch.Tensor]: ...
    def intersect(self, param: int, rank: int) -> tuple[int, int, int, int]:
        """(begin, end) in the parameter and (begin, end) in the rank's shard."""
    def bind_flat_params(self, flat_params: Sequence[torch.Tensor], /) -> None: ...
    def forward(
        self,
        module: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        /,
    ) -> Any: ...
    def summon(
        self,
        *,
        on_first_rank_only: bool = False,
        on_host: bool = False,
        with_grads: bool = False,
    ) -> None: ...
    def dismiss(self, writeback: bool) -> None: ...
    def watch(
        self,
        items: Sequence[tuple[dict[str, Any], str, Any]],
        on_change: Callable[[], object],
        /,
    ) -> None:
        """Let forward call on_change() if, of an item, dict[key] is not value."""
    def replace_param(self, param: int, tensor: torch.Tensor, /) -> None: ...
    def set_reduce_hook(self, state: Any, hook: Callable[..., object], /) -> None: ...
    def clone(self, params: Sequence[torch.Tensor], /) -> Unit: ...

@final
class Engine:
    """Runs the units of one module tree."""

    def __new__(cls, units: Sequence[Unit]) -> Engine: ...
    @property
    def sync(self) -> int: ...
    @sync.setter
    def sync(self, value: int) -> None: ...
    @property
    def in_forward(self) -> bool: ...
    @property
    def in_backward(self) -> bool: ...
    def reset(self) -> None: ...
    def check_order(self, is_on: bool, /) -> None: ...
    def memory_stats(self) -> dict[str, int]: ...
    def trace(self) -> str: ...
    def clip_grad_norm(
        self,
        extra_params: Sequence[torch.Tensor],
        max_norm: float,
        norm_type: float,
    ) -> torch.Tensor: ...

def build_info() -> dict[str, str]: ...
