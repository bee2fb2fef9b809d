"""What holds on any rank: ranks ask each other, on the host where they can."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fsdp_c._torch_compat import serves_host
from fsdp_c._units.device import CPU
from fsdp_c._units.failures import naming_ranks


def on_any_rank(
    flags: Sequence[bool], group: ProcessGroup, device: torch.device, operation: str
) -> list[bool]:
    """Return, for each flag, whether it is set on a rank of ``group``. Collective.

    Over a backend of the CPU if the group has one: then the host does not wait for
    what the device still has to do, torch makes no communicator on the device, and a
    rank that has died is known at once. Else on ``device``.

    Raises:
        RuntimeError: A rank failed; ``operation`` says what the flags are for.
    """
    if group.size() == 1:
        return list(flags)
    where = CPU if serves_host(group) else device
    found = torch.tensor(flags, dtype=torch.uint8, device=where)
    with naming_ranks(group, operation):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in found.tolist()]
