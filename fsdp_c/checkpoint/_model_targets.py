"""Where a load puts the values of parameters and buffers."""

from collections.abc import Callable

import torch

from fsdp_c._state.parts import ParamPart
from fsdp_c.checkpoint._contents import Buffer, Contents
from fsdp_c.checkpoint._memory import was_written
from fsdp_c.checkpoint._plan import Target
from fsdp_c.checkpoint._special import SpecialTarget


class ModelTargets:
    """One target per parameter and buffer: its own memory where that is possible."""

    def __init__(self, contents: Contents) -> None:
        self._finish: list[Callable[[], object]] = []
        self.targets = [
            *(self._of_place(place) for place in contents.places.values()),
            *(self._of_buffer(buffer) for buffer in contents.buffers),
        ]

    def _of_place(self, place: ParamPart) -> Target:
        home = place.home
        what, shape = f"parameter {place.fqn!r}", tuple(place.shape)
        elements = place.begin, place.end
        memory, opaque = home.memory, home.opaque
        if opaque is not None:
            part = torch.empty(0, dtype=place.param.dtype)
            special = SpecialTarget(what, place.names, shape, *elements, part, opaque)
            self._finish.append(special.finish)
            return special
        if memory is not None:
            part = home.values()
            self._finish.append(lambda: was_written(memory))
        else:
            part = torch.empty(
                place.part_numel, dtype=place.param.dtype, device=place.param.device
            )
            self._finish.append(lambda: home.put(part))
        return Target(what, place.names, shape, *elements, part)

    def _of_buffer(self, buffer: Buffer) -> Target:
        tensor = buffer.tensor
        if tensor.dtype == buffer.dtype and tensor.is_contiguous():
            flat = tensor.reshape(-1)
            self._finish.append(lambda: was_written(tensor))
        else:
            flat = torch.empty(tensor.numel(), dtype=buffer.dtype, device=tensor.device)
            self._finish.append(lambda: tensor.copy_(flat.reshape(tensor.shape)))
        return Target(
            f"buffer {buffer.names[0]!r}",
            buffer.names,
            tuple(tensor.shape),
            0,
            tensor.numel(),
            flat,
        )

    def finish(self) -> None:
        """Copy what was read beside its place, once all targets are filled."""
        with torch.no_grad():
            for each in self._finish:
                each()
