"""Operations that are one kernel on an accelerator, and several on meta.

Meanwhile they are functions that allocate and keep what the kernel does, and compute
nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CountFlops = Callable[[int], None]


class _Attention(torch.autograd.Function):
    """A flash attention kernel, which keeps no matrix of weights."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, count: CountFlops
    ) -> Tensor:
        """Return the output; keep it, the inputs and a sum for each row."""
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        # Two products, of queries with keys and of weights with values.
        scores = query.shape[:-1].numel() * key.shape[-2]
        ctx.flops = 2 * scores * (query.shape[-1] + value.shape[-1])
        ctx.count = count
        count(ctx.flops)
        return output

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the three inputs."""
        ctx.count(2 * ctx.flops)
        return (*(torch.empty_like(each) for each in ctx.saved_tensors[:3]), None)


class _RMSNorm(torch.autograd.Function):
    """Keeps its inputs and a factor for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: torch.Size) -> Tensor:
        """Return the output."""
        factors = x.new_empty(rows, dtype=torch.float32)
        ctx.save_for_backward(x, weight, factors)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x`` and ``weight``."""
        tensors = ctx.saved_tensors[:2]
        grads = [
            torch.empty_like(each) if needed else None
            for each, needed in zip(tensors, ctx.needs_input_grad[:2], strict=True)
        ]
        return (*grads, None)


class _Dropout(torch.autograd.Function):
    """Keeps a mask of bytes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the output."""
        output = torch.empty_like(x)
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient of ``x``."""
        del ctx
        return torch.empty_like(grads[0])


@contextmanager
def fused_kernels(count: CountFlops) -> Iterator[None]:
    """Let functions of ``torch.nn.functional`` be such kernels meanwhile.

    Args:
        count: Called with the operations of attention, in forward and in backward.
    """
    rms_norm, dropout = functional.rms_norm, functional.dropout

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return _apply(_Attention, query, key, value, count)

    def fused_rms_norm(
        input: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Any:
        if weight is not None and weight.dtype != input.dtype:  # torch fuses it not
            return rms_norm(input, normalized_shape, weight, eps)
        rows = input.shape[: input.ndim - len(normalized_shape)]
        return _apply(_RMSNorm, input, weight, rows)

    def fused_dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not training or inplace or not 0 < p < 1:
            return dropout(input, p, training, inplace)
        return _apply(_Dropout, input)

    fused = {
        "scaled_dot_product_attention": attention,
        "rms_norm": fused_rms_norm,
        "dropout": fused_dropout,
    }
    originals = {name: getattr(functional, name) for name in fused}
    for name, function in fused.items():
        setattr(functional, name, function)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(functional, name, function)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    apply: Callable[..., Any] = function.apply  # typed in some versions of torch only
    return apply(*args)
