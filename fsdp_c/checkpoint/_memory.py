"""The bytes of tensors, without copies."""

import ctypes
from typing import Any

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, which it keeps.

    Raises:
        ValueError: It is a subclass that wraps other tensors.
    """
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    address = tensor.data_ptr()
    if address == 0:
        kind = type(tensor).__name__
        raise ValueError(f"a {kind} has no memory of its own: pass a plain tensor")
    array: Any = (ctypes.c_ubyte * nbytes).from_address(address)
    array.owner = tensor
    return memoryview(array).cast("B")


def on_host(tensor: Tensor) -> Tensor:
    """Return ``tensor`` detached and contiguous in host memory, itself if it is."""
    return tensor.detach().to("cpu").contiguous()


def is_direct(tensor: Tensor) -> bool:
    """Return whether bytes may be read straight into ``tensor``."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def was_written(tensor: Tensor) -> None:
    """Tell autograd, and units that keep a block, that the values changed."""
    torch.autograd.graph.increment_version(tensor)
