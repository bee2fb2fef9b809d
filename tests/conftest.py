"""pytest's entry: the path of the helpers, the end of the worker pools."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session", autouse=True)
def _worker_pools() -> Iterator[None]:
    """End the processes that `helpers.distributed` started."""
    yield
    module = sys.modules.get("helpers.distributed")
    if module is not None:
        module.close_pools()
