"""pytest's entry: the path of the helpers, markers, the end of the worker pools."""

import importlib.metadata
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from helpers.pairwise import covering

if importlib.metadata.version("torch").startswith("2.11"):  # it has no such meshes
    collect_ignore = ["distributed/test_fully_shard_meshes.py"]

# How many sets of parameters of a test function a push runs, but for folders whose
# parameters are the files or the numbers to check.
NUM_SETS = 2
WHOLE = {"docs", "lint", "unit"}

# What workers import before they are forked if tests of a folder were collected: it
# takes each of them seconds.
IMPORTED_BY = {"huggingface": ("transformers.trainer", "accelerate", "peft")}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that say how many sets of parameters a test function runs."""
    parser.addoption(
        "--full",
        action="store_true",
        help="run every set of parameters of each test function, and what is marked "
        "only_full",
    )
    parser.addoption(
        "--pairs",
        action="store_true",
        help="of each test function run as many sets of parameters as hold every pair "
        f"of values, not only the {NUM_SETS} of them that hold most",
    )
    parser.addoption(
        "--one-each",
        action="store_true",
        help="of each test function run one set of parameters, always the same one",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skip what is about the CPU alone elsewhere; choose what each function runs."""
    device = os.environ.get("FSDP_C_TEST_DEVICE", "cpu")
    for item in items:
        marker = item.get_closest_marker("cpu_only")
        if marker is not None and device != "cpu":
            item.add_marker(pytest.mark.skip(reason=f"cpu_only: {marker.args[0]}"))
    named = config.option.keyword or any("[" in argument for argument in config.args)
    if named or config.getoption("--full"):
        return
    is_brief = config.getoption("--one-each")
    choose = _every_pair if config.getoption("--pairs") else _most_pairs
    if is_brief:
        choose = _one_of_each
    left_out = ["only_full"]
    if is_brief and device != "cpu":
        left_out.append("bookkeeping")
    items_of: dict[str, list[pytest.Item]] = {}
    for item in items:
        if any(item.get_closest_marker(name) for name in left_out):
            continue
        # The same on every device: pytest ran it on the CPU.
        runs_on = getattr(getattr(item, "obj", None), "distributed_device", device)
        if not is_brief or runs_on == device:
            items_of.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {item for name, same in items_of.items() for item in choose(name, same)}
    config.hook.pytest_deselected(items=[i for i in items if i not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tell the parent of workers what to import."""
    folders = {item.path.parent.name for item in session.items} & {*IMPORTED_BY}
    torch, module = map(sys.modules.get, ("torch", "helpers.distributed"))
    # Libraries count GPUs when they are imported, and forks of a process that did so
    # cannot use CUDA.
    if torch is None or module is None or torch.accelerator.is_available():
        return
    for folder in folders:
        module.preloaded.extend(IMPORTED_BY[folder])


def _one_of_each(name: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return one item, at a place that the function's name decides.

    The first ones would all be the plainest cases.
    """
    return [items[zlib.crc32(name.encode()) % len(items)]]


def _every_pair(_: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return items that hold every pair of values and every world size; best first."""
    rows = []
    for item in items:
        call = getattr(item, "callspec", None)
        params = {} if call is None else call.params
        rows.append({name: repr(value) for name, value in params.items()})
    return [items[index] for index in covering(rows, "world_size")]


def _most_pairs(name: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items that hold most pairs."""
    chosen = _every_pair(name, items)
    return chosen if items[0].path.parent.name in WHOLE else chosen[:NUM_SETS]


@pytest.fixture(scope="session", autouse=True)
def _worker_pools() -> Iterator[None]:
    """End the processes that `helpers.distributed` started."""
    yield
    module = sys.modules.get("helpers.distributed")
    if module is not None:
        module.close_pools()
