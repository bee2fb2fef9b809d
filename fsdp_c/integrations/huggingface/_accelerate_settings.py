"""Reads the environment variables by which accelerate passes settings on."""

import os

import torch


def accelerate_setting(name: str, default: str = "") -> str:
    """Return the value of a variable that ``accelerate launch`` sets."""
    return os.environ.get(name, default)


def is_true(value: object) -> bool:
    """Return whether a setting is one of accelerate's words for true."""
    return str(value).lower() in {"y", "yes", "t", "true", "on", "1"}


def is_on(name: str) -> bool:
    """Return whether a variable holds one of them."""
    return is_true(accelerate_setting(name))


def are_on_cpu() -> bool:
    """Return whether a launcher started several processes without an accelerator."""
    is_launched = int(accelerate_setting("LOCAL_RANK", "-1")) >= 0
    num_processes = int(accelerate_setting("WORLD_SIZE", "1"))
    return is_launched and num_processes > 1 and not torch.accelerator.is_available()
