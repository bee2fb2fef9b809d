"""Modules that run in full precision inside a mixed-precision model."""

from typing import Any

import torch
from torch import Tensor, nn


def keep_full_precision(module: nn.Module) -> None:
    """Let ``module`` compute in its own dtype and hide that from its neighbours.

    Floating inputs are converted to the dtype of its first floating parameter or
    buffer (else fp32), outputs back to the dtype in which the inputs came.

    Source:
        ``_override_module_mixed_precision`` (torch 2.13,
        ``fsdp/_common_utils.py``), which FSDP1 applies to the classes in
        ``MixedPrecision._module_classes_to_ignore``.
    """
    island = _Island(module)
    module.register_forward_pre_hook(island.enter, with_kwargs=True)
    module.register_forward_hook(island.leave)


class _Island:
    """The two hooks of one module, and the dtype in which its inputs came."""

    def __init__(self, module: nn.Module) -> None:
        self._dtype = next(
            (
                tensor.dtype
                for tensor in (*module.parameters(), *module.buffers())
                if tensor.is_floating_point()
            ),
            torch.float32,
        )
        self._input_dtype: torch.dtype | None = None

    def enter(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._input_dtype = None
        return self._cast(args, self._dtype), self._cast(kwargs, self._dtype)

    def leave(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        dtype = self._input_dtype
        return output if dtype is None else self._cast(output, dtype)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            if not value.is_floating_point() or value.dtype == dtype:
                return value
            self._input_dtype = value.dtype
            return value.to(dtype)
        if isinstance(value, dict):
            return {key: self._cast(item, dtype) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._cast(item, dtype) for item in value)
        return value
