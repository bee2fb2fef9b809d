"""What the methods of FSDPModule set on a group."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Of groups.
_Refs = Sequence["weakref.ref[Any]"]


@dataclass(frozen=True)
class GroupSettings:
    """The settings of one group; Group.change() replaces them as a whole."""

    reshards: bool | None  # after forward; None: unless it is the root
    keeps_part: bool  # of the parameters until backward, in a group of a few ranks
    syncs: bool = True
    all_reduces: bool = True
    divisor: float = 0.0  # of gradients; 0: the number of ranks
    unshards_in_backward: bool = True
    reshards_after_backward: bool = True  # if that does not reduce
    fills_unused: bool = False
    prefetches: tuple[_Refs, _Refs] = ((), ())  # in forward, in backward
    # Of the root's group, for its whole engine:
    is_last_backward: bool = True
    finalizes_by_hand: bool = False
