"""What is committed is source and small pictures: no core dump, no build product."""

import subprocess

import pytest

from helpers.distributed import TESTS_DIR

ROOT = TESTS_DIR.parent
MAX_NBYTES = 256 << 10


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout")
def test_files_are_small() -> None:
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    paths = [ROOT / name for name in listed.split("\0") if name]
    large = [str(p) for p in paths if p.exists() and p.stat().st_size > MAX_NBYTES]
    assert paths
    assert not large
