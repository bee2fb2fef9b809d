"""pytest's entry: the path of the helpers, markers, the end of the worker pools."""

import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that CI uses on the simulated accelerator."""
    parser.addoption(
        "--one-each",
        action="store_true",
        help="of each test function run one set of parameters, always the same one",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skip what is about the CPU alone elsewhere; choose one of each function."""
    device = os.environ.get("FSDP_C_TEST_DEVICE", "cpu")
    for item in items:
        marker = item.get_closest_marker("cpu_only")
        if marker is not None and device != "cpu":
            item.add_marker(pytest.mark.skip(reason=f"cpu_only: {marker.args[0]}"))
    if config.getoption("--one-each"):
        chosen = _one_of_each(items)
        config.hook.pytest_deselected(items=[i for i in items if i not in chosen])
        items[:] = [item for item in items if item in chosen]


def _one_of_each(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return one item of each function, at a place that its name decides.

    The first ones would all be the plainest cases.
    """
    items_of: dict[str, list[pytest.Item]] = {}
    for item in items:
        items_of.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {
        same[zlib.crc32(name.encode()) % len(same)] for name, same in items_of.items()
    }


@pytest.fixture(scope="session", autouse=True)
def _worker_pools() -> Iterator[None]:
    """End the processes that `helpers.distributed` started."""
    yield
    module = sys.modules.get("helpers.distributed")
    if module is not None:
        module.close_pools()
