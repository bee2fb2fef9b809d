"""This rank's part of a unit's parameters, between steps: to read and to write."""

import torch
from torch import Tensor

from fsdp_c._units.base import ShardedModule
from fsdp_c._units.names import clean_name


class OwnParts:
    """The parts of the parameters of one unit that this rank holds.

    A part is elements ``[begin, end)`` of the flattened parameter. Reading and
    writing goes through what the user sees and may have replaced: the original
    parameters, or the flat ones.

    Args:
        module: A wrapped module, outside forward and backward.
    """

    def __init__(self, module: ShardedModule) -> None:
        unit = module._unit
        rank = module.shard_rank
        self._originals = module._originals
        self._params = unit.param_of_use
        num_params = max(self._params, default=-1) + 1
        self._ranges = [unit.intersect(param, rank) for param in range(num_params)]
        self._segments = [slot[0] for slot in unit.slots]
        self._flat_params = [] if unit.is_summoned else module._originals.flat_params()

    def range_of(self, use: int) -> tuple[int, int]:
        """Return ``[begin, end)`` in the flattened parameter of a use."""
        begin, end, _, _ = self._ranges[self._params[use]]
        return begin, end

    def get(self, use: int) -> Tensor:
        """Return this rank's part, 1-D: the live memory, without gradient."""
        index = self._params[use]
        begin, end, shard_begin, shard_end = self._ranges[index]
        if self._flat_params:
            flat = self._flat_params[self._segments[index]]
            return flat.detach()[shard_begin:shard_end]
        param = self._originals.uses[use].param.detach()
        whole = param.reshape(-1)
        return whole if whole.numel() == end - begin else whole[begin:end]

    def write(self, use: int, value: Tensor) -> None:
        """Copy this rank's part of ``value``, the whole tensor, into place."""
        begin, end = self.range_of(use)
        param = self._originals.uses[use].param
        with torch.no_grad():
            if not self._flat_params and param.shape == value.shape:
                param.copy_(value)
            elif end > begin:
                self.get(use).copy_(value.reshape(-1)[begin:end])


def named_uses(module: ShardedModule) -> list[tuple[str, int]]:
    """Return every place of a unit's parameters: clean name, and number of its use.

    A module that is registered in several places stands here for each of them, as in
    the state dict of the unwrapped model; the names begin at the wrapped module.
    """
    uses: dict[object, list[int]] = {}
    for index, use in enumerate(module._originals.uses):
        uses.setdefault(use.module, []).append(index)
    places = []
    for prefix, current in module.wrapped.named_modules(remove_duplicate=False):
        for index in uses.get(current, ()):
            name = module._originals.uses[index].name
            places.append((clean_name(f"{prefix}.{name}" if prefix else name), index))
    return places
