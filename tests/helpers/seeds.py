"""Seeds: every random number of a test comes from its name and its indices."""

import os
import random
import zlib

import numpy as np
import torch


def seed_of(*parts: object) -> int:
    """Return the seed that belongs to ``parts``: equal on all ranks and runs.

    ``FSDP_C_TEST_SEED`` (an integer, default 0) shifts every seed.
    """
    shift = int(os.environ.get("FSDP_C_TEST_SEED", "0"))
    return zlib.crc32(repr((shift, *parts)).encode())


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seeded(seed: int) -> torch.Generator:
    """Return a generator for the default device; CUDA takes none of the CPU's."""
    device = torch.get_default_device()
    return torch.Generator(device if device.type == "cuda" else "cpu").manual_seed(seed)


def generator(*parts: object) -> torch.Generator:
    """Return a generator for the default device, seeded by ``parts``."""
    return seeded(seed_of(*parts))
