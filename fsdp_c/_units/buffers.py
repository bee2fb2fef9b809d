"""Mixed precision of buffers: cast for compute, restored for state dicts.

Buffers are not sharded. A unit's own floating buffers are cast when its engine is
made, so at the root's first forward at the latest, and stay cast; only the mode
(``train()``, ``eval()``) may change them again, so a step does nothing here.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fsdp_c._units.names import clean_name


class UnitBuffers:
    """The floating buffers of a unit's own modules, and their dtypes before any cast.

    Compute is in ``dtype``, or in eval mode, with ``is_full_in_eval``, in the original
    ones. Without ``dtype`` nothing is cast and there are none here.

    Source:
        ``_get_buffers_and_dtypes_for_computation``,
        ``_cast_buffers_to_dtype_and_device`` (torch 2.13,
        ``fsdp/_runtime_utils.py``). FSDP1 goes by the root's mode, this by that of
        the buffer's own unit.
    """

    def __init__(
        self,
        module: nn.Module,
        own_modules: Iterable[nn.Module],
        *,
        dtype: torch.dtype | None,
        is_full_in_eval: bool,
    ) -> None:
        self._module = module
        self._dtype = dtype
        self._is_full_in_eval = is_full_in_eval
        self._is_active = False
        own = set() if dtype is None else set(own_modules)
        self._places = {
            clean_name(f"{prefix}.{name}" if prefix else name): (current, name)
            for prefix, current in (
                module.named_modules(remove_duplicate=False) if own else ()
            )
            if current in own
            for name in current._buffers
        }
        self.original_dtypes: dict[str, torch.dtype] = {}  # by clean name
        self._remember()

    def activate(self) -> None:
        """Cast the buffers, and from now on at every change of the mode."""
        self._is_active = True
        self.follow(is_training=self._module.training)

    def follow(self, *, is_training: bool) -> None:
        """Cast the buffers to what the mode wants, once they are active."""
        if not self._is_active:
            return
        is_full = self._is_full_in_eval and not is_training
        for fqn, original in self.original_dtypes.items():
            self._cast(fqn, original if is_full else self._dtype or original)

    @contextmanager
    def in_original_dtypes(self) -> Iterator[None]:
        """Undo the cast for a while; dtypes that changed in it are the new ones."""
        for fqn, original in self.original_dtypes.items():
            self._cast(fqn, original)
        yield
        self._remember()
        self.follow(is_training=self._module.training)

    def _remember(self) -> None:
        self.original_dtypes = {
            fqn: buffer.dtype
            for fqn in self._places
            if (buffer := self._find(fqn)) is not None
        }

    def _find(self, fqn: str) -> Tensor | None:
        """Return the buffer if it is there and floating."""
        module, name = self._places[fqn]
        buffer = module._buffers.get(name)
        return buffer if buffer is not None and buffer.is_floating_point() else None

    def _cast(self, fqn: str, dtype: torch.dtype) -> None:
        buffer = self._find(fqn)
        if buffer is not None and buffer.dtype != dtype:
            with torch.no_grad():
                buffer.data = buffer.data.to(dtype)
