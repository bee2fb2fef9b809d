"""Runs a script as it is and says, at the end, whose class wrapped its modules.

python run_and_tell.py SCRIPT ARGUMENTS...
"""

import atexit
import runpy
import sys
from typing import Any

from torch.distributed import fsdp

modules: set[str] = set()


def tell() -> None:
    for name in sorted(modules):
        print(f"wrapped in: {name}")


original: Any = fsdp.FullyShardedDataParallel.__init__


def init(self: Any, *args: Any, **kwargs: Any) -> None:
    modules.add(type(self).__module__)
    original(self, *args, **kwargs)


fsdp.FullyShardedDataParallel.__init__ = init  # type: ignore[method-assign]

shard: Any = fsdp.fully_shard


def fully_shard(*args: Any, **kwargs: Any) -> Any:
    modules.add(shard.__module__)
    return shard(*args, **kwargs)


fsdp.fully_shard = fully_shard
atexit.register(tell)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
