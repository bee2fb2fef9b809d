"""A folder that all ranks of a test see."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield its path on every rank; it is removed at the end. Collective."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    try:
        yield Path(names[0])
        dist.barrier()  # not after an exception: other ranks may not come
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(names[0], ignore_errors=True)
