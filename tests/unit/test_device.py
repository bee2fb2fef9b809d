"""Which device a unit computes on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_c._units.device import CPU, choose_device, device_from_id

CUDA, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


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


def on(device: torch.device) -> Any:
    """Return what stands for a parameter there."""
    return SimpleNamespace(device=device)


@pytest.mark.parametrize("second", [OTHER, CPU])
def test_several_devices(second: torch.device) -> None:
    """Torch's kinds of errors, and the words that its users look for."""
    params = [("a", on(CUDA)), ("b", on(second))]
    group: Any = object()
    words = rf"single device modules.*'a' on cuda:0, 'b' on {second}.*pass in device_id"
    with pytest.raises(RuntimeError, match=words):
        choose_device(None, params, [], group)
    with pytest.raises(ValueError, match=r"Inconsistent devices, cuda:0 vs cuda:1"):
        choose_device(OTHER, params[:1], [], group)


def test_an_accelerator_without_an_index(monkeypatch: Any) -> None:
    """It is the current device, which may be another rank's."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    with pytest.warns(UserWarning, match="not have an explicit index: cuda:1, the cur"):
        assert device_from_id("cuda") == OTHER
    assert device_from_id("cuda:0") == CUDA
