"""Which of these tests can run: transformers needs Python 3.11."""

from importlib.util import find_spec

import pytest

NEED_TRANSFORMERS = ["test_fsdp_settings.py"]
collect_ignore = [] if find_spec("transformers") else NEED_TRANSFORMERS


def pytest_report_header(config: pytest.Config) -> str:
    """Say what is left out."""
    left_out = ", ".join(collect_ignore)
    return f"integrations: without transformers, left out: {left_out or 'nothing'}"
