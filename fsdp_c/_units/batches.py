"""Batches: lists of what goes into one collective."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def in_batches(
    items: Iterable[tuple[Item, object, int]], most_nbytes: int
) -> Iterator[list[Item]]:
    """Yield the items, which come with a kind and bytes, in lists.

    The items of a list are consecutive, of one kind, and have at most ``most_nbytes``
    together. A larger item is in a list of its own.
    """
    batch: list[Item] = []
    kind: object = None
    nbytes = 0
    for item, its_kind, its_nbytes in items:
        if batch and (its_kind != kind or nbytes + its_nbytes > most_nbytes):
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        kind = its_kind
        nbytes += its_nbytes
    if batch:
        yield batch
