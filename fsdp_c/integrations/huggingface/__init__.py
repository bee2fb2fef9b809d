"""Makes Hugging Face's Trainer and accelerate use fsdp_c's FullyShardedDataParallel.

``install()`` before the model is wrapped is all that a script needs; it may stand
before or after the other imports. Their configuration must ask for FSDP version 1,
as ``fsdp_config={"version": 1}``. See docs/huggingface.md.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_c.integrations.huggingface._patch import IntegrationWarning
from fsdp_c.integrations.huggingface._swap import Swap

__all__ = [
    "IntegrationWarning",
    "install",
    "installed",
    "is_installed",
    "uninstall",
]

_lock = threading.RLock()
_swap: Swap | None = None


def install() -> None:
    """Put fsdp_c's class in the place of torch's, in all modules that hold it.

    Functions of accelerate, peft and transformers that would not work with FSDP
    version 1 are changed as well; docs/huggingface.md lists them. Modules that are
    not imported yet are changed when they are. Again: no effect.

    Warns:
        IntegrationWarning: A function is not as expected, in a version of a library
            that is not known; it is left as it is.
    """
    global _swap  # noqa: PLW0603
    with _lock:
        if _swap is None:
            _swap = Swap()
        else:
            _swap.settle()


def uninstall() -> None:
    """Put everything back that :func:`install` changed. Not installed: no effect.

    Modules imported in the meantime that took torch's name get torch's class.
    Models that are wrapped already stay what they are.
    """
    global _swap  # noqa: PLW0603
    with _lock:
        if _swap is not None:
            _swap.undo()
            _swap = None


def is_installed() -> bool:
    """Return whether fsdp_c's class is in the place of torch's."""
    return _swap is not None


@contextmanager
def installed() -> Iterator[None]:
    """Be installed for a while; afterwards as before."""
    was_installed = is_installed()
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()
