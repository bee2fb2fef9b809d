"""Collectives that the user sets for a group: torch's Comm objects, and a hook.

The engine calls them instead of its transport, or after it, with pieces of its own
memory; a unit without them never comes here.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_c import _native
from fsdp_c._torch_compat import interpreted_with_callees

# Of each segment: the elements of all ranks, and this rank's.
Pieces = Sequence[tuple[Tensor, Tensor]]


class Comms:
    """What the user set for one group.

    Attributes:
        all_gather: torch's AllGather; None: the transport does it.
        reduce_scatter: torch's ReduceScatter; likewise.
        hook: Called with the reduced gradients; None: nothing.
        stream: The stream that the hook runs on; None: that of the reduction.
    """

    def __init__(self) -> None:
        self.all_gather: Any = None
        self.reduce_scatter: Any = None
        self.hook: Callable[[Tensor], object] | None = None
        self.stream: Any = None

    def apply(self, unit: _native.Unit) -> None:
        """Tell the unit which calls are the user's; after each change."""
        kinds = {
            _native.CUSTOM_ALL_GATHER: self.all_gather,
            _native.CUSTOM_REDUCE_SCATTER: self.reduce_scatter,
            _native.CUSTOM_REDUCED: self.hook,
        }
        unit.set_custom(self._run, sum(kind for kind, each in kinds.items() if each))

    def check_own_memory(self, method: str) -> None:
        """Check that no custom collective is set.

        torch checks this in the methods that choose the memory of collectives.

        Raises:
            AssertionError: One is set; the message names ``method``.
        """
        for what, comm in (
            ("all gather", self.all_gather),
            ("reduce scatter", self.reduce_scatter),
        ):
            if comm is not None:  # torch's first words
                raise AssertionError(
                    f"cannot call {method}() when {what} comm is custom: "
                    f"{type(comm).__name__}"
                )

    @interpreted_with_callees
    def _run(
        self, kind: int, pieces: Pieces, group: ProcessGroup, rank: int, scale: float
    ) -> None:
        if kind == _native.CUSTOM_ALL_GATHER:
            self._gather(pieces, group, rank)
            return
        for _, same in groupby(
            sorted(pieces, key=lambda piece: str(piece[1].dtype)),
            key=lambda piece: piece[1].dtype,
        ):
            if kind == _native.CUSTOM_REDUCE_SCATTER:
                self._reduce(list(same), group)
            else:
                self._show([own for _, own in same], scale)

    def _gather(self, pieces: Pieces, group: ProcessGroup, rank: int) -> None:
        """Gather all pieces in one call, as bytes if their dtypes differ."""
        if len({own.dtype for _, own in pieces}) > 1:
            pieces = [
                (whole.view(torch.uint8), own.view(torch.uint8))
                for whole, own in pieces
            ]
        sizes = [own.numel() for _, own in pieces]
        numel = sum(sizes)
        output = _allocate(self.all_gather, numel * group.size(), pieces[0][1])
        mine = output.narrow(0, rank * numel, numel)
        torch.cat([own for _, own in pieces], out=mine)
        _wait(
            self.all_gather(
                output_tensor=output, input_tensor=mine, group=group, async_op=False
            )
        )
        arrived = output.view(group.size(), numel).split_with_sizes(sizes, dim=1)
        for (whole, _), part in zip(pieces, arrived, strict=True):
            whole.view(part.shape).copy_(part)

    def _reduce(self, pieces: Pieces, group: ProcessGroup) -> None:
        """Sum the pieces of all ranks in one call."""
        sizes = [own.numel() for _, own in pieces]
        numel = sum(sizes)
        given = _allocate(self.reduce_scatter, numel * group.size(), pieces[0][1])
        rows = [whole.view(group.size(), -1) for whole, _ in pieces]
        torch.cat(rows, dim=1, out=given.view(group.size(), numel))
        output = _allocate(self.reduce_scatter, numel, pieces[0][1])
        _wait(
            self.reduce_scatter(
                output_tensor=output,
                input_tensor=given,
                group=group,
                op=dist.ReduceOp.SUM,
            )
        )
        for (_, own), part in zip(pieces, output.split_with_sizes(sizes), strict=True):
            own.copy_(part)

    def _show(self, owns: Sequence[Tensor], scale: float) -> None:
        """Call the hook with the averaged gradients, and copy its changes back."""
        assert self.hook is not None
        reduced = torch.cat(list(owns)).mul_(scale)
        if self.stream is None:
            self.hook(reduced)
        else:
            device = torch.get_device_module(reduced.device)
            current = device.current_stream(reduced.device)
            self.stream.wait_stream(current)
            with device.stream(self.stream):
                self.hook(reduced)
            current.wait_stream(self.stream)
        parts = reduced.split_with_sizes([own.numel() for own in owns])
        for own, part in zip(owns, parts, strict=True):
            own.copy_(part)


def _allocate(comm: Any, numel: int, like: Tensor) -> Tensor:
    memory: Tensor = comm.allocate((numel,), dtype=like.dtype, device=like.device)
    return memory


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
