"""Which of these tests can run: transformers needs Python 3.11, torchao is optional."""

from importlib.util import find_spec

import pytest

NEEDS = {"transformers": "test_fsdp_settings.py", "torchao": "test_torchao.py"}
collect_ignore = [file for package, file in NEEDS.items() if not find_spec(package)]


def pytest_report_header(config: pytest.Config) -> str:
    """Say what is left out."""
    left_out = ", ".join(collect_ignore)
    return f"integrations: for want of a package, left out: {left_out or 'nothing'}"
