"""Reads the environment variables by which accelerate passes settings on."""

import os


def accelerate_setting(name: str, default: str = "") -> str:
    """Return the value of a variable that ``accelerate launch`` sets."""
    return os.environ.get(name, default)


def is_on(name: str) -> bool:
    """Return whether a variable holds one of accelerate's words for true."""
    return accelerate_setting(name).lower() in {"y", "yes", "t", "true", "on", "1"}
