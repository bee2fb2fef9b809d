"""A program that installs fsdp_c where Hugging Face's libraries cannot be imported."""
# ruff: noqa: E402 - the first lines are what it is about

import sys
from typing import Any

for name in ("accelerate", "transformers", "peft"):
    assert name not in sys.modules
    sys.modules[name] = None  # type: ignore[assignment]

import torch.distributed.fsdp as package

import fsdp_c
from fsdp_c.integrations import huggingface

huggingface.install()
found: Any = package.FullyShardedDataParallel
assert found is fsdp_c.FSDP
huggingface.uninstall()
found = package.FullyShardedDataParallel
assert found is not fsdp_c.FSDP
