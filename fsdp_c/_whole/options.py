"""Whether the parameter groups of all ranks say the same after a step.

Prodigy and D-Adaptation take a distance from all parameters of a group. On an owner
they see some of them, so that each rank has a distance, and so a rate, of its own.
"""

import warnings
import zlib
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

_NUM_BITS = 8  # of a digest


def _numbers(optimizer: Optimizer, group: int) -> dict[str, float]:
    """Return the floats among a group's options, but for those on a device."""
    found = {}
    for name, value in optimizer.param_groups[group].items():
        if isinstance(value, Tensor):
            if value.numel() == 1 and value.is_cpu and value.is_floating_point():
                found[name] = float(value)
        elif isinstance(value, float):
            found[name] = value
    return found


def digest_flags(optimizer: Optimizer) -> list[bool]:
    """Return flags that show a difference if some rank has set them: see differs().

    For each group each bit of a digest and its opposite; none of a group that has no
    parameters here.
    """
    flags: list[bool] = []
    for number, group in enumerate(optimizer.param_groups):
        digest = zlib.crc32(repr(_numbers(optimizer, number)).encode())
        for bit in range(_NUM_BITS):
            is_set = bool(digest >> bit & 1)
            has_any = bool(group["params"])
            flags += [has_any and is_set, has_any and not is_set]
    return flags


def differs(flags: Sequence[bool]) -> bool:
    """Whether ranks differ, by the flags that any of them has set."""
    return any(a and b for a, b in zip(flags[::2], flags[1::2], strict=True))


def warn_of_difference(optimizer: Optimizer) -> None:
    """Name the numbers that are no longer those that the optimizer was made with."""
    changed = [
        f"{name}={value:.3g}"
        for number in range(len(optimizer.param_groups))
        for name, value in _numbers(optimizer, number).items()
        if value != optimizer.defaults.get(name)
    ]
    here = ", ".join(changed[:4]) or "nothing has changed"
    warnings.warn(
        f"the parameter groups of {type(optimizer).__name__} differ between ranks "
        f"(here {here}): it takes numbers from all parameters of a group, of which "
        "whole_parameter_optimizer gives each rank some, so its steps are not those of "
        "the unsharded optimizer; or the ranks' schedules differ",
        stacklevel=4,
    )
