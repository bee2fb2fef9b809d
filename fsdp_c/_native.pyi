"""The CPython module: units, engines, placements. Conversion only; no policy."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final, type_check_only

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

PREFETCH_NONE: int
PREFETCH_PRE: int
PREFETCH_POST: int
PLAN_ENTER: int
PLAN_USE: int
PLAN_WORK: int
PLAN_LEAVE: int
SYNC_NONE: int
SYNC_REDUCE: int
SYNC_SHARD: int
BEGIN_CAPTURE: int
FORK_LANES: int
JOIN_LANES: int
END_CAPTURE: int
BEGIN_REPLAY: int
END_REPLAY: int
CUSTOM_ALL_GATHER: int
CUSTOM_REDUCE_SCATTER: int
CUSTOM_REDUCED: int
TIMELINE_IS_AHEAD: int
TIMELINE_IS_KEPT: int
TIMELINE_IS_UNUSED: int
TIMELINE_WAS_DONE: int
TIMELINE_FORMAT: str
TIMELINE_KINDS: tuple[str, ...]

@final
class Unit:
    """One unit: the parameters of one wrapped module, flattened and sharded."""

    def __new__(
        cls,
        name: str,
        params: Sequence[torch.Tensor],
        device: torch.device,
        *,
        shard_group: ProcessGroup | None = None,
        replica_group: ProcessGroup | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        use_orig_params: bool = True,
        reshard_after_forward: bool = True,
        shows_kept: bool = True,
        reshard_after_backward_without_sync: bool = True,
        backward_prefetch: int = 1,  # PREFETCH_PRE
        forward_prefetch: bool = False,
        cast_forward_inputs: bool = False,
        cast_root_forward_inputs: bool = False,
        keep_low_precision_grads: bool = False,
        offloads: bool = False,
        shard_dims: Sequence[int] | None = None,
        part_group: ProcessGroup | None = None,
        extended: Sequence[int] | None = None,
        block_numels: Sequence[int] | None = None,
        like: Layout | None = None,
        is_apart: bool = False,
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
    def is_requested(self) -> bool: ...
    @property
    def holds_grads(self) -> bool: ...
    @property
    def layout(self) -> Layout: ...
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
    def parts(self, param: int, /) -> list[tuple[int, int]]:
        """Per rank: (begin, end) of what it holds of the parameter."""
    def bind_rows(
        self,
        places: Sequence[
            tuple[
                dict[str, Any],
                str,
                torch.Tensor,
                torch.Tensor,
                torch.Tensor | None,
                Any | None,
            ]
        ],
        make_grad: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        on_replaced: Callable[[], object],
        local_grad: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
        extend: Callable[[int, int], Any] | None = None,
        /,
    ) -> None:
        """Register plain parameters in forward and backward, sharded ones else."""
    def bind_sharded(
        self, param: int, dtensor: torch.Tensor, local: torch.Tensor, /
    ) -> None: ...
    def part_of(self, param: int, /) -> torch.Tensor:
        """The local tensor of a parameter's part; empty while none is kept."""
    def bind_parallel(
        self, param: int, dtensor: torch.Tensor, local: torch.Tensor, /
    ) -> None: ...
    def unshard(self) -> None: ...
    def wait_unshard(self) -> None: ...
    def reshard(self) -> None: ...
    def set(
        self,
        *,
        sync: int = -1,
        reshard_after_forward: int = -1,
        divisor: float = -1.0,
        unshard_in_backward: int = -1,
        keeps_part: int = -1,
        reshard_after_backward: int = -1,
        fills_unused: int = -1,
        keeps_for_inference: int = -1,
    ) -> None: ...
    def set_prefetches(self, in_backward: bool, units: Sequence[Unit], /) -> None: ...
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
    def note_forwards(self, function: Callable[[], object] | None, /) -> None:
        """Let forward call function() first; None: nothing."""
    def note_failures(self, function: Callable[[BaseException], object], /) -> None:
        """Let a forward that fails, no recomputation, call function(exception)."""
    def note_writes(self, function: Callable[[torch.Tensor], object], /) -> None:
        """Let a forward in which a parameter was written call function(parameter)."""
    def show_kept(self, shows: bool, /) -> None:
        """Let the engine's units show what they keep for backward, or shards."""
    def replace_param(self, param: int, tensor: torch.Tensor, /) -> None: ...
    def leave_params(self) -> None:
        """Leave the parameters to others, while a graph may keep the unit."""
    def set_reduce_hook(self, state: Any, hook: Callable[..., object], /) -> None: ...
    def set_custom(self, function: Callable[..., object], kinds: int, /) -> None: ...
    def follow_reductions(self, function: Callable[[], object] | None, /) -> None: ...
    def offload_activations(self, min_nbytes: int, keep_last: int, /) -> None: ...
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
    @property
    def is_recording(self) -> bool: ...
    def reset(self) -> None: ...
    def reduce_kept(self) -> None: ...
    def run_capture_stage(self, stage: int, /) -> None: ...
    def check_order(self, is_on: bool, /) -> None: ...
    def wait_for_reduces(self, is_on: bool, /) -> None: ...
    def memory_stats(self) -> dict[str, int]: ...
    def log(self) -> str: ...
    def start_timeline(self, capacity: int, num_steps: int, /) -> None: ...
    def stop_timeline(self) -> tuple[bytes, bytes, int, int, int]:
        """(entries, marks, num_lost, num_steps, full_ns).

        Entries are structs of TIMELINE_FORMAT: (begin_ns, end_ns, sequence, nbytes,
        unit, mark_begin, mark_end, kind, flags), in the order of their ends. Marks are
        times of the device, int64 ns. full_ns is 0 if it did not become full.
        """
    def begin_wholes(self, kind: int, /) -> tuple[int, int]:
        """Begin a span of a round of whole parameters: (begin_ns, mark)."""
    def end_wholes(
        self, kind: int, begin_ns: int, mark: int, nbytes: int, /
    ) -> None: ...
    def clip_grad_norm(
        self,
        extra_params: Sequence[torch.Tensor],
        max_norm: float,
        norm_type: float,
    ) -> torch.Tensor: ...

@final
class Layout:
    """Where parameters lie in flat shards.

    Of ``params``, each (numel, dtype, requires_grad), none is shared. ``itemsize``:
    a segment aligns to 16 bytes with the smaller of this and its own itemsize.
    With ``row_numels``, the elements of a row of each parameter, each is a segment by
    rows, which nothing aligns. With ``block_numels``, the elements of blocks of each
    parameter, these are kept whole. With ``segments`` and ``offsets``, where each
    parameter lies, and ``shard_numels`` per segment, it was made before.
    """

    def __new__(
        cls,
        params: Sequence[tuple[int, torch.dtype, bool]],
        world_size: int,
        *,
        itemsize: int = 16,
        align_params: bool,
        align_shards: bool,
        row_numels: Sequence[int] | None = None,
        block_numels: Sequence[int] | None = None,
        segments: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        shard_numels: Sequence[int] | None = None,
    ) -> Layout: ...
    @property
    def world_size(self) -> int: ...
    @property
    def alignment(self) -> tuple[int, bool, bool]:
        """(itemsize, align_params, align_shards), as given to the constructor."""
    @property
    def is_placed(self) -> bool:
        """Whether the slots do not follow from alignment or rows."""
    @property
    def slots(self) -> list[tuple[int, int, int]]:
        """Per parameter: (segment, offset, numel), in elements."""
    @property
    def segments(self) -> list[tuple[torch.dtype, bool, int, int, int, int]]:
        """Per segment: (dtype, requires_grad, num_params, unsharded_numel,
        shard_numel, padded_numel).
        """
    def intersect(self, param: int, rank: int) -> tuple[int, int, int, int]:
        """(begin, end) in the parameter and (begin, end) in the rank's shard."""
    def parts(self, param: int, /) -> list[tuple[int, int]]:
        """Per rank: (begin, end) of what it holds of the parameter."""

@final
class Placement:
    """Where elements of parameters lie: pieces of numbered buffers.

    A piece (param, begin, end, buffer, offset) says that elements [begin, end) of
    the flattened parameter are in the buffer from element ``offset`` on.
    """

    @classmethod
    def flat(
        cls, layout: Layout, segment: int, *, rank: int | None = None
    ) -> Placement:
        """A segment's shards, or one of them: buffer = rank."""
    @classmethod
    def flat_range(
        cls,
        layout: Layout,
        segment: int,
        ranges: Sequence[tuple[int, int, int]],
    ) -> Placement:
        """Of a segment's shards, what holds ``ranges``: (param, begin, end) each.

        Costs as much as it returns, whatever the number of ranks and parameters.
        """
    @classmethod
    def on_ranks(cls, numels: Sequence[int], begin: int, end: int) -> Placement:
        """Whole parameters on each of the ranks ``[begin, end)``: buffer = rank.

        A numel of 0 leaves a parameter out.
        """
    @classmethod
    def rows(
        cls,
        shapes: Sequence[Sequence[int]],
        num_ranks: int,
        *,
        rank: int | None = None,
    ) -> Placement:
        """Parameters cut along dimension 0 as torch.chunk does: buffer = rank.

        In a rank's buffer the parts lie one behind the other. A scalar goes to
        rank 0; a shape with a 0 in it leaves the parameter out.
        """
    def buffers(self, param: int, /) -> list[int]:
        """The buffers of a parameter's pieces, by what lies in them."""
    def numel(self, param: int, buffer: int, /) -> int:
        """Elements of a parameter in a buffer."""
    @property
    def pieces(self) -> list[tuple[int, int, int, int, int]]:
        """Those that are not empty, by (param, begin)."""
    def __len__(self) -> int: ...

def build_info() -> dict[str, str]: ...
def choose_alignment(
    param_itemsize: int, use_orig_params: bool, is_cpu: bool, unit_nbytes: int
) -> tuple[int, bool, bool]:
    """(itemsize, align_params, align_shards) of a unit's layout."""

def plan_step(
    units: Sequence[
        tuple[
            str,
            Layout,
            Sequence[tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]],
            int,
            bool,
            bool,
            bool,
            bool,
            int,
            bool,
            bool,
        ]
    ],
    forward: Sequence[
        tuple[int, int, int, int, int, float]
        | tuple[int, int, int, int, int, float, int, int, bool]
    ],
    backward: Sequence[
        tuple[int, int, int, int, int, float]
        | tuple[int, int, int, int, int, float, int, int, bool]
    ],
    shard_link: tuple[float, float],
    replica_link: tuple[float, float],
    *,
    num_batches: int = 1,
    accumulation: int = ...,
    wants_scratch: bool = False,
    is_host: bool = False,
    hosts: tuple[int, float, float] = (0, 1.0, 0.0),
    offload: tuple[int, float] = ...,
) -> dict[str, Any]:
    """What a rank needs for a training step; see fsdp_c.tools.plan."""

def transport(group: ProcessGroup, device: torch.device, /) -> tuple[str, str]:
    """What carries a group's collectives, "shm", "nccl" or "c10d", and why c10d."""

def parts() -> dict[str, str]:
    """What of fsdp_c's own transports and kernels can be used here; tries them.

    ``why_no_shm``, ``why_no_nccl``, ``why_no_cuda_kernels`` (empty for what can be
    used), ``nccl_path``, ``nccl_origin``, ``nccl_version``.
    """

# A move: (source, dtype, position, held, needed, target, shape); see
# fsdp_c._state.exchange.Move.
_Move: TypeAlias = tuple[
    torch.Tensor | None,
    torch.dtype,
    int,
    Placement,
    Placement,
    torch.Tensor | None,
    tuple[int, ...] | None,
]

@type_check_only
class Copies:
    """Copies of an exchange, for copy_tensors()."""

def prepare_exchange(
    rank: int,
    world_size: int,
    moves: Sequence[_Move],
    device: torch.device,
    *,
    direct_nbytes: int,
) -> tuple[
    list[torch.Tensor],
    list[tuple[int, torch.Tensor]],
    list[tuple[int, torch.Tensor]],
    Copies,
    Copies,
]:
    """Plan one rank's part of an exchange: see csrc/core/state/exchange.h.

    Args:
        rank: This one.
        world_size: Of the group.
        moves: Of all items; the placements' buffers are ranks.
        device: Of the messages. Results are there: the targets or, where there is
            none or it is not the CPU, new tensors.
        direct_nbytes: Pieces of at least so many bytes are messages of their own.

    Returns:
        ``(results, outgoing, incoming, copies, unpacking)``: messages are
        ``(peer, tensor)``, views of bytes. The copies of ``unpacking`` are for when
        the messages are there.
    """

def exchange_size(moves: Sequence[_Move], *, direct_nbytes: int) -> tuple[int, int]:
    """(nbytes, packed_nbytes): of all that is held, and of what goes in pieces of
    fewer than ``direct_nbytes``. Replicas count once; all ranks get the same.
    """

def pass_messages(
    group: ProcessGroup,
    label: str,
    outgoing: Sequence[tuple[int, torch.Tensor]],
    incoming: Sequence[tuple[int, torch.Tensor]],
    copies: Copies | None = None,
) -> bool:
    """Pass CPU tensors through shared memory; False if that is not possible."""

def deal_out(
    costs: Sequence[int],
    nbytes: Sequence[int],
    *,
    num_owners: int,
    num_shards: int,
    round_nbytes: int,
    shards: Sequence[int],
) -> list[tuple[int, int]]:
    """Per parameter: (owner, round); ``shards`` have the wholes, -1: none has."""

def broadcast(group: ProcessGroup, tensor: torch.Tensor, label: str, /) -> bool:
    """Overwrite a tensor on a device with rank 0's, through NCCL; False: it cannot."""

def copy_tensors(copies: Copies, /) -> None:
    """Make them."""

def expect_writes() -> None:
    """Let all engines gather anew in their next forward: parameters will be written."""

def lend_shards(
    groups: list[dict[str, Any]],
    states: dict[torch.Tensor, Any],
    params: dict[torch.Tensor, DTensor],
    lent_states: dict[torch.Tensor, Any],
    make_state: Callable[[DTensor, dict[str, Any]], dict[str, Any]],
    /,
) -> list[dict[str, Any]] | None:
    """What to step instead of DTensors; None: they cannot be lent."""

def watched_engine(engine: Any, /) -> Any:
    """Autograd's engine, whose calls all engines of units are told of."""

def describe_failure(process_group: ProcessGroup, cause: str, operation: str, /) -> str:
    """``cause``, and what the ranks were doing. Breaks the group if it is gloo's."""

def crc32c(data: torch.Tensor | bytes | bytearray | memoryview, value: int = 0) -> int:
    """CRC-32C of the bytes of a contiguous CPU tensor or a buffer."""
