"""fsdp_c inside other libraries: Hugging Face, Lightning, and whatever names torch's.

``install()`` before the model is wrapped is all that a script needs; it may stand
before or after the other imports. See docs/guide/frameworks.md.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_c.integrations._swap import Swap

__all__ = ["install", "installed", "is_installed", "uninstall"]

_lock = threading.RLock()
_active: "Swap | None" = None


def install() -> None:
    """Put fsdp_c's class and fully_shard() in the place of torch's, in all modules.

    Functions of accelerate, peft and transformers that would not work with fsdp_c are
    changed as well; docs/guide/huggingface.md lists them. Modules that
    are imported later are changed then. A second call has no effect.

    Warns:
        IntegrationWarning: A function is not as expected, in a version of a library
            that is not known; it is left as it is.
    """
    # Nothing that it needs is imported unless it is called.
    from fsdp_c.integrations._swap import Swap  # noqa: PLC0415

    global _active  # noqa: PLW0603
    with _lock:
        if _active is None:
            _active = Swap()


def uninstall() -> None:
    """Put everything back that :func:`install` changed. Not installed: no effect.

    Modules imported in the meantime that took torch's name get torch's class.
    Models that are wrapped already stay what they are.
    """
    global _active  # noqa: PLW0603
    with _lock:
        if _active is not None:
            _active.undo()
            _active = None


def is_installed() -> bool:
    """Return whether fsdp_c's names are in the place of torch's."""
    return _active is not None


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
