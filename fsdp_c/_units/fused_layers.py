"""Units inside of a layer that computes in one kernel, in evaluation.

``nn.TransformerEncoderLayer`` then hands the parameters of its modules to a kernel and
calls none of them, so none would gather. If one has a hook, it calls them; torch's
``fully_shard`` hooks every module.
"""

from typing import Any

from torch import nn

from fsdp_c._torch_compat import CHECKPOINT_WRAPPED_MODULE

_FUSED = (nn.MultiheadAttention, nn.Linear, nn.LayerNorm)


def ask_to_be_called(unit: nn.Module) -> None:
    """Give the module of a unit a hook if such a layer may have it."""
    if isinstance(getattr(unit, CHECKPOINT_WRAPPED_MODULE, unit), _FUSED):
        unit.register_forward_pre_hook(_nothing)


def _nothing(*_: Any) -> None:
    pass
