"""These tests need packages that requirements-dev.txt has for Python 3.11 and newer."""

from importlib.util import find_spec

import pytest

MISSING = [
    name for name in ("accelerate", "peft", "transformers") if find_spec(name) is None
]


def pytest_runtest_setup() -> None:
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
