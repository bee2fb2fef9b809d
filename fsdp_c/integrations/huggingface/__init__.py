"""Makes Hugging Face's Trainer and accelerate use fsdp_c, with FSDP version 1 or 2.

``install()`` is ``fsdp_c.install()``, which does this for all libraries. See
docs/guide/huggingface.md.
"""

from fsdp_c.integrations import install, installed, is_installed, uninstall
from fsdp_c.integrations._patch import IntegrationWarning

__all__ = [
    "IntegrationWarning",
    "install",
    "installed",
    "is_installed",
    "uninstall",
]
