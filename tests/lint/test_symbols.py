"""The built extension exports its init function and nothing else."""

import importlib.util
import shutil
import subprocess

import pytest


@pytest.mark.skipif(shutil.which("nm") is None, reason="binutils' nm is missing")
def test_only_the_init_function_is_exported() -> None:
    spec = importlib.util.find_spec("fsdp_c._native")
    assert spec is not None, "run `make build` first"
    assert spec.origin is not None
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", spec.origin],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert {line.split()[-1] for line in listing.splitlines()} == {"PyInit__native"}
