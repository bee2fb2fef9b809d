"""Moves parts of tensors from the ranks that hold them to those that need them.

Note [One exchange per unit]
What a unit's states need is one list of *items*; for every item each rank holds a
range of elements and needs a range, both known to all ranks by arithmetic. Every
pair of ranks passes what one holds and the other needs: the small pieces packed side
by side, whatever their dtypes, as one message; pieces of DIRECT_NBYTES and more
straight from their memory into their place, which needs neither memory nor a copy.
So a whole result costs as many bytes on the wire as it has, and no rank receives
what it does not need.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_c._failures import naming_ranks
from fsdp_c._native import CopyPlan, Placement, empty_tensors, pass_messages

# Pieces of at least this size are not packed.
DIRECT_NBYTES = 1024 * 1024

Range = tuple[int, int]


class Item(NamedTuple):
    """A 1-D tensor of which ranks hold and need ranges ``(begin, end)``.

    Each element that a rank needs must be held by exactly one rank.
    """

    dtype: torch.dtype
    held_by: Callable[[int], Range]
    needed_by: Callable[[int], Range]


class _Piece(NamedTuple):
    item: int
    begin: int
    end: int
    nbytes: int


def transfer(
    items: Sequence[Item],
    parts: Sequence[Tensor | None],
    *,
    group: ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """Return, for each item, what this rank needs; see Note [One exchange per unit].

    All ranks of ``group`` must call it with the same items.

    Args:
        items: What the ranks hold and need.
        parts: What this rank holds of each item, 1-D, on any device; None where
            that is nothing.
        group: The ranks.
        device: Where ``group`` communicates, and the results are.

    Returns:
        1-D tensors with memory of their own.
    """
    rank, world_size = group.rank(), group.size()
    held = [_range(item.held_by(rank)) for item in items]
    needed = [_range(item.needed_by(rank)) for item in items]
    sources = [_bytes_of(part, device) for part in parts]
    results = _empty([end - begin for begin, end in needed], items, device)
    targets = [result.view(torch.uint8) for result in results]
    outgoing_messages: list[tuple[int, Tensor]] = []
    incoming_messages: list[tuple[int, Tensor]] = []
    own: list[tuple[Tensor, Tensor]] = []
    unpacking: list[tuple[Tensor, list[Tensor]]] = []
    packages: dict[tuple[_Piece, ...], Tensor] = {}  # equal for several peers
    for peer in range(world_size):
        outgoing = _pieces(items, held, [_range(i.needed_by(peer)) for i in items])
        out = _slices(outgoing, items, sources, held)
        incoming = _pieces(items, [_range(i.held_by(peer)) for i in items], needed)
        into = _slices(incoming, items, targets, needed)
        if peer == rank:
            own = list(zip(out, into, strict=True))
            continue
        large, small = _split(out)
        if small:
            content = tuple(outgoing)
            if content not in packages:
                packages[content] = _pack(small, device)
            large.append(packages[content])
        outgoing_messages += [(peer, each) for each in large]
        large, small = _split(into)
        if small:
            nbytes = sum(each.numel() for each in small)
            packed = torch.empty(nbytes, dtype=torch.uint8, device=device)
            unpacking.append((packed, small))
            large.append(packed)
        incoming_messages += [(peer, each) for each in large]
    # The messages travel while this rank copies what it holds itself.
    if device.type == "cpu" and pass_messages(
        group, outgoing_messages, incoming_messages, own
    ):
        works = []
    else:
        works = _start(outgoing_messages, incoming_messages, group)
        _copy([source for source, _ in own], [target for _, target in own])
    with naming_ranks(group, "transfer of optimizer states"):
        for work in works:
            work.wait()
    for packed, small in unpacking:
        _unpack(packed, small)
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


def _range(given: Range) -> Range:
    begin, end = given
    return (begin, end) if begin < end else (0, 0)


def _bytes_of(part: Tensor | None, device: torch.device) -> Tensor:
    if part is None:
        return torch.empty(0, dtype=torch.uint8, device=device)
    flat = part.detach().to(device).reshape(-1).contiguous()
    return flat.view(torch.uint8)


def _pieces(
    items: Sequence[Item], held: Sequence[Range], needed: Sequence[Range]
) -> list[_Piece]:
    """Return the pieces that go from a rank that holds to one that needs."""
    found = []
    for index, (item, (a, b), (c, d)) in enumerate(
        zip(items, held, needed, strict=True)
    ):
        begin, end = max(a, c), min(b, d)
        if begin < end:
            found.append(_Piece(index, begin, end, (end - begin) * item.dtype.itemsize))
    return found


def _slices(
    pieces: Sequence[_Piece],
    items: Sequence[Item],
    memory: Sequence[Tensor],
    ranges: Sequence[Range],
) -> list[Tensor]:
    """Return the bytes of ``pieces`` in ``memory``, which holds ``ranges``."""
    return [
        memory[piece.item].narrow(
            0,
            (piece.begin - ranges[piece.item][0]) * items[piece.item].dtype.itemsize,
            piece.nbytes,
        )
        for piece in pieces
    ]


def _split(slices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the large ones, to be passed straight, and the small ones."""
    large = [each for each in slices if each.numel() >= DIRECT_NBYTES]
    return large, [each for each in slices if each.numel() < DIRECT_NBYTES]


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


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each of ``sources`` into the one of ``targets``; bytes."""
    whole = Placement.whole([each.numel() for each in sources])
    CopyPlan(whole, whole).run(sources, targets)


def _placements(slices: Sequence[Tensor]) -> tuple[Placement, Placement, int]:
    """Return where ``slices`` are, where they are side by side, and their bytes."""
    pieces, begin = [], 0
    for index, each in enumerate(slices):
        pieces.append((index, 0, each.numel(), 0, begin))
        begin += each.numel()
    return Placement.whole([each.numel() for each in slices]), Placement(pieces), begin


def _pack(slices: Sequence[Tensor], device: torch.device) -> Tensor:
    apart, together, nbytes = _placements(slices)
    packed = torch.empty(nbytes, dtype=torch.uint8, device=device)
    CopyPlan(apart, together).run(slices, [packed])
    return packed


def _unpack(packed: Tensor, slices: Sequence[Tensor]) -> None:
    apart, together, _ = _placements(slices)
    CopyPlan(together, apart).run([packed], slices)


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
