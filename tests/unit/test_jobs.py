"""helpers.jobs: tests in several processes are reported as in one."""

import re
import subprocess
import sys
from pathlib import Path

from helpers.distributed import TESTS_DIR
from helpers.jobs import _Queue

CONFTEST = """
from helpers import distributed
from helpers.jobs import Jobs

distributed.fork_server = lambda: None  # imports torch, which these tests do not need


def pytest_configure(config):
    config.pluginmanager.register(Jobs(2))
"""
TESTS = """
import os, signal, warnings
import pytest

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made")
    yield path / "file"
    assert len((path / "file").read_text()) == 3, "torn down early"

@pytest.mark.parametrize("number", range(3))
def test_shared(number, made):
    with made.open("a") as file:
        file.write(".")

def test_fails():
    print("what it printed")
    os.write(2, b"what C printed")
    warnings.warn("what it warned of")
    assert 1 == 2

@pytest.mark.skip(reason="why it is skipped")
def test_skipped():
    pass

def test_ends():
    os.kill(os.getpid(), signal.SIGKILL)

def test_after():
    pass
"""


def run(folder: Path, *options: str) -> str:
    """Run pytest on two files of the same tests; return its output."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name in ("one", "two"):
        (folder / f"test_{name}.py").write_text(TESTS)
    words = ["-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), "-ra"]
    done = subprocess.run(
        [sys.executable, *words, *options, str(folder)],
        env={"PYTHONPATH": str(TESTS_DIR)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_reports(tmp_path: Path) -> None:
    output = run(tmp_path)
    assert "4 failed, 8 passed, 2 skipped, 2 warnings" in output
    for text in ("what it printed", "what C printed", "why it is skipped"):
        assert text in output
    assert "UserWarning: what it warned of" in output
    assert len(re.findall(r"^job\d ended with status -9$", output, re.MULTILINE)) == 2


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    output = run(tmp_path, "-x")
    assert re.search("stopping after [12] failures", output)
    assert "ended with status" not in output


def test_a_file_stays_in_one_job_until_none_is_new() -> None:
    paths = [Path(name) for name in "aaaabbbbcc"]
    queue = _Queue(paths)
    first, second = [queue.take(None)], [queue.take(None)]
    for _ in range(3):
        first.append(queue.take(first[-1]))
    assert first == [0, 1, 2, 3]
    first.append(queue.take(3))
    assert first[-1] == 8, "the file that nobody has begun"
    assert [queue.take(8), queue.take(9)] == [9, 5], "what is left of another one"
    queue.put_back([5])
    assert [queue.take(second[-1]) for _ in range(4)] == [5, 6, 7, None]


def test_no_more_tests_are_handed_out() -> None:
    queue = _Queue([Path("a")] * 3)
    queue.clear()
    assert queue.take(None) is None
