"""Checkpoints as folders of safetensors files, from any world size to any other.

No pickle is written or read. docs/guide/checkpoint.md describes the format.
"""

from fsdp_c.checkpoint._errors import CheckpointError
from fsdp_c.checkpoint._export import export
from fsdp_c.checkpoint._import import Imported, import_safetensors
from fsdp_c.checkpoint._load import Loaded, load
from fsdp_c.checkpoint._save import SaveHandle, save
from fsdp_c.checkpoint._verify import Info, info, verify

__all__ = [
    "CheckpointError",
    "Imported",
    "Info",
    "Loaded",
    "SaveHandle",
    "export",
    "import_safetensors",
    "info",
    "load",
    "save",
    "verify",
]
