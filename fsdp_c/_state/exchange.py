"""Moves parts of parameters, and of their states, from rank to rank.

Note [One exchange]
Every conversion is an exchange: it moves items from how the ranks hold them to how they
need them. Both are placements over the ranks of a group (see
:class:`fsdp_c._state.parts.Spread`), which all ranks know by arithmetic, so sizes are
not sent. Between two ranks small pieces go packed, whatever their dtypes, as one
message. Pieces of DIRECT_NBYTES and more go straight from their source into their
target, without a buffer in between. No rank receives what it does not need.
csrc/core/state/exchange.h plans it.

Note [Batches of units]
An exchange takes what it packs as extra memory, and on an accelerator its results too,
which go to the host or into place afterwards. So several units share one exchange only
while their extra memory together is at most the bytes of the largest unit, or
SHARED_NBYTES if all are small. Ranks that do not wait for each other after each unit
are faster.

All ranks of a group must batch alike. They know the same units of their own group, but
not of others: with rank0_only, a rank in another replica leaves out what is not for it.
So each group's units are batched by themselves, whatever stands between them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_c._native import (
    Placement,
    copy_tensors,
    exchange_size,
    pass_messages,
    prepare_exchange,
)
from fsdp_c._state.parts import ParamPart
from fsdp_c._units.base import ShardedModule
from fsdp_c._units.collectives import in_batches, naming_ranks
from fsdp_c._units.device import CPU, backends_of

# Pieces of at least this size are not packed.
DIRECT_NBYTES = 1024 * 1024

# Units with less extra memory together share an exchange, however small each is.
SHARED_NBYTES = 16 * 1024 * 1024


class Move(NamedTuple):
    """A tensor, from how the ranks hold it to how they need it.

    ``source`` is what this rank holds of it, on any device, its gradient aside; None
    for nothing. A rank that holds all that it needs copies it, otherwise each element
    must be on one rank. ``target`` is contiguous, of this dtype and in host memory, and
    no source's memory.
    """

    source: Tensor | None
    dtype: torch.dtype
    position: int  # in both placements
    held: Placement
    needed: Placement
    target: Tensor | None = None  # where it goes; None: new memory
    # Of new memory, on a rank that needs as many elements; otherwise it is 1-D.
    shape: torch.Size | None = None


class UnitMoves(NamedTuple):
    """What is exchanged of one unit."""

    module: ShardedModule
    moves: list[Move]

    def size(self) -> tuple[int, int]:
        """Return its bytes, and how many of them are extra memory at most."""
        nbytes, packed_nbytes = exchange_size(self.moves, direct_nbytes=DIRECT_NBYTES)
        on_host = self.module.compute_device == CPU
        return nbytes, packed_nbytes if on_host else nbytes


class ExchangeItem(NamedTuple):
    key: Any  # the caller's
    part: ParamPart
    move: Move


def exchange(
    items: Iterable[ExchangeItem], what: str, *, over_replicas: bool = False
) -> Iterator[tuple[ExchangeItem, Tensor]]:
    """Yield each item and what this rank needs of it: :func:`exchange_units`."""
    of_unit: dict[ShardedModule, list[ExchangeItem]] = {}
    for item in items:
        of_unit.setdefault(item.part.over, []).append(item)
    units = [
        UnitMoves(module, [item.move for item in its_items])
        for module, its_items in of_unit.items()
    ]
    results = exchange_units(units, what, over_replicas=over_replicas)
    for unit, its_results in results:
        yield from zip(of_unit[unit.module], its_results, strict=True)


def exchange_units(
    units: Sequence[UnitMoves], what: str, *, over_replicas: bool = False
) -> Iterator[tuple[UnitMoves, list[Tensor]]]:
    """Yield each unit and what this rank needs of its moves.

    That is in the moves' targets or in new memory. The units of a group come one after
    the other. All ranks of a group must call it with the same moves over it (but for
    the sources), and take all results, which may be on the CPU. Groups are those that
    shard, or those that replicate. Errors name ``what`` and the units. See Note
    [Batches of units].
    """
    of_place: dict[tuple[ProcessGroup, torch.device], list[UnitMoves]] = {}
    for unit in units:
        place = _place_of(unit, over_replicas=over_replicas)
        of_place.setdefault(place, []).append(unit)
    for (group, device), its_units in of_place.items():
        sizes = [unit.size() for unit in its_units]
        most = max([SHARED_NBYTES, *(nbytes for nbytes, _ in sizes)])
        sized = [
            (unit, None, extra)
            for unit, (_, extra) in zip(its_units, sizes, strict=True)
        ]
        for batch in in_batches(sized, most):
            first, last = (each.module._sharded.name for each in (batch[0], batch[-1]))
            names = repr(first) if len(batch) == 1 else f"{first!r} to {last!r}"
            label = f"exchange of {what} of unit {names}"
            moves = [move for unit in batch for move in unit.moves]
            results = iter(exchange_in(group, device, moves, label))
            for unit in batch:
                yield unit, list(islice(results, len(unit.moves)))


def _place_of(
    unit: UnitMoves, *, over_replicas: bool
) -> tuple[ProcessGroup, torch.device]:
    """Return the group that a unit is exchanged over, and its device."""
    module = unit.module
    group: ProcessGroup | None = module.process_group
    if over_replicas:
        group = module._sharded.groups.inter_node_group
    assert group is not None
    return group, module.compute_device


def exchange_in(
    group: ProcessGroup, device: torch.device, moves: Sequence[Move], label: str
) -> list[Tensor]:
    """Return what this rank needs of each, in one exchange of ``group``.

    ``device`` is the one of the sources, ``label`` the exchange's name in errors.
    """
    return begin_exchange_in(group, device, moves, label)()


def begin_exchange_in(
    group: ProcessGroup, device: torch.device, moves: Sequence[Move], label: str
) -> Callable[[], list[Tensor]]:
    """Begin :func:`exchange_in`; what is returned ends it, and is called once.

    Until then sources and targets are read and written, unless ``group`` passes
    messages through shared memory: those have been passed.
    """
    device = _exchange_device(group, device)
    results, outgoing, incoming, copies, unpacking = prepare_exchange(
        group.rank(), group.size(), moves, device, direct_nbytes=DIRECT_NBYTES
    )
    if group.size() == 1:
        copy_tensors(copies)
        return lambda: results
    works: list[dist.Work] = []
    with naming_ranks(group, label):
        # The messages travel while this rank copies what it holds itself.
        is_passed = device == CPU and pass_messages(
            group, label, outgoing, incoming, copies
        )
        operations = [
            dist.P2POp(call, memory, group=group, group_peer=peer)
            for call, messages in ((dist.isend, outgoing), (dist.irecv, incoming))
            for peer, memory in ([] if is_passed else messages)
        ]
        if operations:
            works = dist.batch_isend_irecv(operations)
    if not is_passed:
        copy_tensors(copies)

    messages = [*outgoing, *incoming]  # works need not hold their memory

    def end() -> list[Tensor]:
        with naming_ranks(group, label):
            for work in works:
                work.wait()
        messages.clear()
        copy_tensors(unpacking)
        return results

    return end


def runs_beside(group: ProcessGroup, device: torch.device) -> bool:
    """Whether an exchange goes on, on a stream, while this thread does other work."""
    return group.size() > 1 and _exchange_device(group, device) != CPU


def _exchange_device(group: ProcessGroup, device: torch.device) -> torch.device:
    """Return where messages are passed: with gloo and MPI in host memory only."""
    if device.type != "cpu":
        backend = backends_of(group).get(device.type)
        if backend not in (None, "gloo", "mpi"):
            return device
    return CPU
