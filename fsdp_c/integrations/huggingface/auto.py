"""Importing this module installs: the one line that a script needs.

    import fsdp_c.integrations.huggingface.auto

Source:
    See ``install`` in ``fsdp_c.integrations``.
"""

from fsdp_c.integrations import install

install()
