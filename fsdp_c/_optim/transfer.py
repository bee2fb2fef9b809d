"""Moves parts of tensors from the ranks that hold them to those that need them.

Note [One exchange]
What a unit's states need, or several units', is one list of *items*; for every item
each rank holds a range of elements and needs a range, both known to all ranks by
arithmetic. Every pair of ranks passes what one holds and the other needs: the small
pieces packed side by side, whatever their dtypes, as one message; pieces of
DIRECT_NBYTES and more straight from their memory into their place, which needs neither
memory nor a copy. So a whole result costs as many bytes on the wire as it has, and no
rank receives what it does not need. csrc/core/state/exchange.h plans it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_c._native import (
    CopyPlan,
    Placement,
    empty_tensors,
    pass_messages,
    prepare_messages,
)
from fsdp_c._units.failures import naming_ranks

# Pieces of at least this size are not packed.
DIRECT_NBYTES = 1024 * 1024

# Elements ``(begin, end)``.
Range = tuple[int, int]


class Item(NamedTuple):
    """A 1-D tensor of which ranks hold and need ranges, one for each rank.

    Each element that a rank needs must be held by exactly one rank.
    """

    dtype: torch.dtype
    held: Sequence[Range]
    needed: Sequence[Range]


def transfer(
    items: Sequence[Item],
    parts: Sequence[Tensor | None],
    *,
    group: ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """Return, for each item, what this rank needs; see Note [One exchange].

    All ranks of ``group`` must call it with the same items.

    Args:
        items: What the ranks hold and need.
        parts: What this rank holds of each item, on any device; None where that is
            nothing.
        group: The ranks.
        device: Where ``group`` communicates, and the results are.

    Returns:
        1-D tensors with memory of their own.
    """
    rank = group.rank()
    needed = [item.needed[rank] for item in items]
    results = _empty([end - begin for begin, end in needed], items, device)
    outgoing, incoming, copies, unpacking = prepare_messages(
        rank,
        [(item.dtype.itemsize, item.held, item.needed) for item in items],
        parts,
        results,
        direct_nbytes=DIRECT_NBYTES,
    )
    # The messages travel while this rank copies what it holds itself.
    if device.type == "cpu" and pass_messages(group, outgoing, incoming, copies):
        works = []
    else:
        works = _start(outgoing, incoming, group)
        _copy(copies)
    with naming_ranks(group, "transfer of optimizer states"):
        for work in works:
            work.wait()
    _copy(unpacking)
    return results


def _empty(
    numels: Sequence[int], items: Sequence[Item], device: torch.device
) -> list[Tensor]:
    dtypes = [item.dtype for item in items]
    if device.type == "cpu":
        return empty_tensors(numels, dtypes)
    return [
        torch.empty(numel, dtype=dtype, device=device)
        for numel, dtype in zip(numels, dtypes, strict=True)
    ]


def _start(
    outgoing: Sequence[tuple[int, Tensor]],
    incoming: Sequence[tuple[int, Tensor]],
    group: ProcessGroup,
) -> list[dist.Work]:
    """Start to pass messages; return what is to be waited for."""
    calls = ((dist.isend, outgoing), (dist.irecv, incoming))
    operations = [
        dist.P2POp(call, memory, group=group, group_peer=peer)
        for call, messages in calls
        for peer, memory in messages
    ]
    with naming_ranks(group, "transfer of optimizer states"):
        return dist.batch_isend_irecv(operations) if operations else []


def _copy(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Make copies, ``(source, target)`` each, of bytes."""
    if not copies:
        return
    whole = Placement.whole([source.numel() for source, _ in copies])
    plan = CopyPlan(whole, whole)
    plan.run([source for source, _ in copies], [target for _, target in copies])


def transfer_device(device: torch.device, group: ProcessGroup) -> torch.device:
    """Return where ``group`` can pass messages for a unit on ``device``.

    gloo and MPI pass messages between host memory only.
    """
    if device.type != "cpu":
        pairs = dist.get_backend_config(group).split(",")
        backends = dict(pair.split(":", 1) for pair in pairs if ":" in pair)
        if backends.get(device.type) not in (None, "gloo", "mpi"):
            return device
    return torch.device("cpu")
