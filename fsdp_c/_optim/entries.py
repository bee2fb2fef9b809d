"""Entries: the sharded states that are to be loaded, unit by unit."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_c._optim.header import TensorInfo, Wanted
from fsdp_c._optim.places import Place
from fsdp_c._optim.transfer import Item, transfer, transfer_device
from fsdp_c._units.base import ShardedModule

# This rank's parts, by first name of the parameter and name of the state.
Values = dict[tuple[str, str], Tensor]


class Entry(NamedTuple):
    """One state of one parameter, which has one value per element."""

    place: Place
    name: str  # of the parameter, in the state dict
    key: str  # of the state
    info: TensorInfo


def all_entries(wanted: Mapping[str, Wanted]) -> list[Entry]:
    """Return the sharded states of all parameters, in their order."""
    return [
        Entry(each.place, each.name, key, info)
        for each in wanted.values()
        for key, info in each.sharded.items()
    ]


def by_module(entries: Iterable[Entry]) -> dict[ShardedModule | None, list[Entry]]:
    """Return the entries of each unit; None for those outside of all units."""
    result: dict[ShardedModule | None, list[Entry]] = {}
    for entry in entries:
        result.setdefault(entry.place.module, []).append(entry)
    return result


def take(
    values: Values,
    entries: Sequence[Entry],
    items: Sequence[Item],
    parts: Sequence[Tensor | None],
    *,
    group: ProcessGroup,
    device: torch.device,
) -> None:
    """Put into ``values`` what this rank needs, see :func:`transfer`.

    Args:
        values: [out] One for each entry.
        entries: The states.
        items: What the ranks of ``group`` hold and need of them.
        parts: What this rank holds of them.
        group: The ranks.
        device: Of the unit.
    """
    received = transfer(
        items, parts, group=group, device=transfer_device(device, group)
    )
    for entry, value in zip(entries, received, strict=True):
        place = entry.place
        values[place.fqn, entry.key] = value.to(place.param.device)
