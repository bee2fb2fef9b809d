"""Process groups that are not c10d's: any object with rank() and size().

FSDP1 accepts them, and PyTorch's own tests wrap modules with one.
"""

from typing import Any, NoReturn

from torch.distributed import ProcessGroup


class ForeignGroup(ProcessGroup):
    """Stands for the user's ``group`` where the native unit needs c10d's class.

    A module can be wrapped and inspected with it, as with FSDP1; its first
    communication raises.
    """

    def __init__(self, group: Any) -> None:
        # The stub lacks c10d's constructor without a store.
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.given = group
        self._kind = type(group).__name__

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        return self._kind

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"the process group of this module is a {self._kind}, which cannot "
            "communicate: it is enough for wrapping; to run the module pass a "
            "torch.distributed.ProcessGroup"
        )


# c10d's names for its collectives; the second half up to torch 2.12.
for _name in (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather_into_tensor_coalesced",
    "alltoall_base",
    "reduce_scatter_tensor_coalesced",
):
    setattr(ForeignGroup, _name, ForeignGroup._refuse)


def is_foreign_group(group: object) -> bool:
    """Return whether wrapping a module can do with ``group``."""
    methods = (getattr(group, name, None) for name in ("rank", "size"))
    return all(map(callable, methods)) and not isinstance(group, type)


def as_given(group: ProcessGroup) -> Any:
    return group.given if isinstance(group, ForeignGroup) else group
