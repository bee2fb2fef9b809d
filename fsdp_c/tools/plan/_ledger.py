"""Bytes of the tensors that are alive, from their creation to their end."""

import weakref
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# torch's caching allocator gives every tensor a multiple of this.
_ALIGNMENT = 512


def allocated_nbytes(nbytes: int) -> int:
    """Return what the allocator takes for a tensor of so many bytes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def plain_tensor(tensor: Tensor) -> Tensor:
    """Return what this rank has of a DTensor, or what a collective will have made."""
    while is_traceable_wrapper_subclass(tensor):
        (name, *_), _context = tensor.__tensor_flatten__()
        tensor = getattr(tensor, name)
    return tensor


class Change(NamedTuple):
    """What happened to the bytes since the last one was taken."""

    nbytes: int = 0  # held now beyond what was held at its beginning; negative: fewer
    peak_nbytes: int = 0  # the most that was held beyond it meanwhile, >= 0


@dataclass
class Storage:
    """A storage that is alive."""

    nbytes: int  # that it counts
    saved_by: int | None = None  # whatever its user knows it by, once autograd saved it


class Ledger:
    """Follows the storages of the tensors that it is shown."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._live: dict[int, Storage] = {}
        self._references: dict[int, weakref.ref[object]] = {}
        self._begin = self._peak = 0
        self.held = 0

    def add(self, tensor: Tensor, *, counts: bool = True) -> Storage:
        """Follow the tensor's storage, if it is a new one; return it.

        ``counts=False``: its bytes are counted elsewhere.
        """
        storage = plain_tensor(tensor).untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is not None:
            return known
        added = Storage(allocated_nbytes(storage.nbytes()) if counts else 0)
        self._live[key] = added
        # The address may be another storage's as soon as this one has ended.
        self._references[key] = weakref.ref(storage, lambda _: self._end(key))
        self.held += added.nbytes
        self._peak = max(self._peak, self.held)
        return added

    def take_over(self, tensor: Tensor) -> None:
        """Stop counting the tensor's storage: somebody else does."""
        storage = self.add(tensor)
        self.held -= storage.nbytes
        storage.nbytes = 0

    def change(self) -> Change:
        """Return the change since the last call."""
        change = Change(self.held - self._begin, self._peak - self._begin)
        self._begin = self._peak = self.held
        return change

    def _end(self, key: int) -> None:
        del self._references[key]
        self.held -= self._live.pop(key).nbytes
