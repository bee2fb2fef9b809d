"""Which parameters can be flattened: plain tensors whose memory is their own."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp_c._torch_compat import overrides_dispatch


def check_kind(name: str, param: nn.Parameter) -> None:
    """Check that parameter ``name`` is one that can be flattened.

    Also where it has no memory yet.

    Raises:
        ValueError: It cannot; the message says why and what to do.
    """
    problem = _problem(param)
    if problem is not None:
        raise ValueError(f"parameter {name!r} {problem}")


def _problem(param: nn.Parameter) -> str | None:
    """Return what keeps a parameter from being flattened, and the remedy."""
    kind = type(param).__name__
    left_alone = "or list it in ignored_states, which leaves it alone"
    if is_lazy(param):
        return (
            f"is an {kind}, which has no shape yet: run the module's forward once "
            "before wrapping it"
        )
    if isinstance(param, DTensor):
        return (
            f"is a DTensor ({', '.join(map(str, param.placements))}): tensor "
            "parallelism cannot be combined with a unit; pass its full_tensor(), "
            f"{left_alone}"
        )
    if param.is_nested:
        return (
            "is a nested tensor, whose parts have shapes of their own: register one "
            f"parameter for each part, {left_alone}"
        )
    if param.is_quantized:
        return (
            f"is a quantized tensor ({param.dtype}), whose elements mean nothing "
            f"without their scale: pass its dequantize(), {left_alone}"
        )
    if param.layout is not torch.strided:
        layout = str(param.layout).removeprefix("torch.")
        what = "sparse" if "sparse" in layout else "opaque"
        return (
            f"is {what} ({layout}): make it dense with to_dense(), or list its module "
            "in ignored_modules"
        )
    if not param.is_leaf:
        return (
            "is not a leaf of the autograd graph (it is the result of a computation): "
            "register it as nn.Parameter(value.detach())"
        )
    if overrides_dispatch(param) and not _has_own_memory(param):
        return (
            f"is a {kind}, a tensor subclass that wraps other tensors and has no "
            f"memory of its own: pass a plain tensor, {left_alone}"
        )
    return None


def _has_own_memory(param: nn.Parameter) -> bool:
    """Whether the elements lie in the tensor's own storage, or will (meta)."""
    try:
        return (
            param.is_meta
            or param.numel() == 0
            or param.untyped_storage().data_ptr() != 0
        )
    except RuntimeError:  # a storage that nothing may read
        return False
