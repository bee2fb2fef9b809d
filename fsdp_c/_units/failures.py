"""Collectives that Python issues: a failure says what every rank was doing."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from fsdp_c import _native


@contextmanager
def naming_ranks(group: ProcessGroup | None, operation: str) -> Iterator[None]:
    """Add to an error of a collective what the ranks of its group were doing.

    Put only the collective inside: any other RuntimeError would be reported as the
    failure of a rank. ``None`` is the default group, as in torch.distributed. A group
    cannot be used after a failure; ``operation`` is what the collective is for.
    """
    try:
        yield
    except NotImplementedError:
        raise  # of the backend, not of the ranks
    except RuntimeError as error:
        process_group = group or c10d._get_default_group()
        report = _native.describe_failure(process_group, str(error), operation)
        raise type(error)(report) from error
