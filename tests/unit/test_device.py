"""Which device a unit computes on."""

from typing import Any

import torch
from torch import nn

from fsdp_c._units.device import CPU, choose_device

CUDA = torch.device("cuda", 0)


def test_without_parameters_of_its_own(monkeypatch: Any) -> None:
    """A module takes the device of the units within it, whatever its group carries."""
    name = "fsdp_c._units.device._accelerator_of_group"
    monkeypatch.setattr(name, lambda group: None)  # gloo's
    group: Any = object()
    assert choose_device(None, [], [CUDA], group) == CUDA
    assert choose_device(None, [], [], group) == CPU
    own = nn.Parameter(torch.ones(1, device="cpu"))
    assert choose_device(None, [("own", own)], [CUDA], group) == CPU
    assert choose_device(CPU, [], [CUDA], group) == CPU
