"""Moves parts of parameters, and of their states, from rank to rank.

Note [One exchange]
Every conversion is an exchange: of items that the ranks hold in one way to the way in
which they need them. Both ways are placements over the ranks of a group (see
:class:`fsdp_c._state.parts.Spread`), which all ranks know by arithmetic, so sizes are
not sent. Whole tensors on rank 0 alone are the case that only rank 0 needs anything.
Between two ranks small pieces go packed, whatever their dtypes, as one message. Pieces
of DIRECT_NBYTES and more go straight from their memory into their place, without
memory or a copy beside. No rank receives what it does not need.
csrc/core/state/exchange.h plans it.

Note [Batches of units]
An exchange takes what it packs as extra memory, and on an accelerator its results too,
which go to the host or into place afterwards. So several units go in one exchange only
as long as that is no more than the largest unit has. Ranks that do not wait for each
other after each unit are faster. All ranks batch alike.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_c._native import (
    Placement,
    copy_tensors,
    empty_tensors,
    exchange_size,
    pass_messages,
    prepare_exchange,
)
from fsdp_c._units.failures import naming_ranks

# Pieces of at least this size are not packed.
DIRECT_NBYTES = 1024 * 1024

_CPU = torch.device("cpu")


class ExchangeItem(NamedTuple):
    """The elements of a parameter, or of one of its states.

    Attributes:
        key: The caller's; comes back with the result.
        source: What this rank holds of it, on any device; None for nothing.
        dtype: Of the elements.
        param: The parameter's number in the placements.
        held: Where it lies; a rank that holds all that it needs copies it, otherwise
            each element must be on one rank.
        needed: Where it shall lie.
    """

    key: Any
    source: Tensor | None
    dtype: torch.dtype
    param: int
    held: Placement
    needed: Placement

    def native(self) -> tuple[int, int, Placement, Placement]:
        """Return it as :mod:`fsdp_c._native` takes it."""
        return self.dtype.itemsize, self.param, self.held, self.needed


class UnitItems(NamedTuple):
    """What is exchanged of one unit; the same on all ranks but for the sources.

    Attributes:
        name: Of the unit, for messages.
        group: The ranks.
        device: Of the unit.
        items: What its states or parameters are.
    """

    name: str
    group: ProcessGroup
    device: torch.device
    items: Sequence[ExchangeItem]

    def size(self) -> tuple[int, int]:
        """Return its bytes, and how many of them are extra memory at most."""
        items = [each.native() for each in self.items]
        nbytes, packed_nbytes = exchange_size(items, direct_nbytes=DIRECT_NBYTES)
        return nbytes, packed_nbytes if self.device == _CPU else nbytes


def exchange(units: Iterable[UnitItems], what: str) -> Iterator[tuple[Any, Tensor]]:
    """Yield, for each item, its key and what this rank needs of it.

    All ranks of the groups must call it with the same units, and take all results.
    See Note [Batches of units].

    Args:
        units: Those without items take no part.
        what: What is exchanged, for messages: ``"optimizer states"``.

    Returns:
        1-D tensors with memory of their own, on :func:`exchange_device`.

    Raises:
        RuntimeError: A rank failed or did not come; the message names the units.
    """
    for batch in _batches([unit for unit in units if unit.items]):
        first, last = batch[0], batch[-1]
        names = repr(first.name)
        if last is not first:
            names = f"{names} to {last.name!r}"
        items = [item for unit in batch for item in unit.items]
        results = _exchange(
            items, first.group, first.device, f"exchange of {what} of unit {names}"
        )
        yield from zip((item.key for item in items), results, strict=True)


def _batches(units: Sequence[UnitItems]) -> Iterator[list[UnitItems]]:
    """Yield the units in lists of which each is for one exchange."""
    sizes = [unit.size() for unit in units]
    most = max((nbytes for nbytes, _ in sizes), default=0)
    batch: list[UnitItems] = []
    extra = 0
    for unit, (_, more) in zip(units, sizes, strict=True):
        if batch and (batch[-1][1:3] != unit[1:3] or extra + more > most):
            yield batch
            batch, extra = [], 0
        batch.append(unit)
        extra += more
    if batch:
        yield batch


def _exchange(
    items: Sequence[ExchangeItem],
    group: ProcessGroup,
    unit_device: torch.device,
    label: str,
) -> list[Tensor]:
    device = exchange_device(unit_device, group)
    rank = group.rank()
    results = _empty(
        [each.needed.numel(each.param, rank) for each in items], items, device
    )
    outgoing, incoming, copies, unpacking = prepare_exchange(
        rank,
        group.size(),
        [each.native() for each in items],
        [each.source for each in items],
        results,
        direct_nbytes=DIRECT_NBYTES,
    )
    if group.size() == 1:
        copy_tensors(copies)
        return results
    works: list[dist.Work] = []
    with naming_ranks(group, label):
        # The messages travel while this rank copies what it holds itself.
        is_passed = device == _CPU and pass_messages(
            group, label, outgoing, incoming, copies
        )
        if not is_passed:
            works = _start(outgoing, incoming, group)
    if not is_passed:
        copy_tensors(copies)
        with naming_ranks(group, label):
            for work in works:
                work.wait()
    copy_tensors(unpacking)
    return results


def _empty(
    numels: Sequence[int], items: Sequence[ExchangeItem], device: torch.device
) -> list[Tensor]:
    dtypes = [item.dtype for item in items]
    if device == _CPU:
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
    operations = [
        dist.P2POp(call, memory, group=group, group_peer=peer)
        for call, messages in ((dist.isend, outgoing), (dist.irecv, incoming))
        for peer, memory in messages
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def exchange_device(device: torch.device, group: ProcessGroup) -> torch.device:
    """Return where ``group`` can pass messages for a unit on ``device``.

    gloo and MPI pass messages between host memory only.
    """
    if device.type != "cpu":
        pairs = dist.get_backend_config(group).split(",")
        backends = dict(pair.split(":", 1) for pair in pairs if ":" in pair)
        if backends.get(device.type) not in (None, "gloo", "mpi"):
            return device
    return _CPU
