"""Optimizers whose step of a part is not a part of their step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Shampoo(Optimizer):
    """Factors of the gradient's sums over either dimension, as Shampoo's."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                change = param.grad
                for dim in range(param.dim()) if param.dim() == 2 else ():
                    flat = param.grad if dim == 0 else param.grad.T
                    name = f"factor_{dim}"
                    state[name] = state.get(name, 0) + flat @ flat.T
                    change = _inverse_root(state[name], change, dim)
                param.add_(change, alpha=-group["lr"])


def _inverse_root(factor: Tensor, change: Tensor, dim: int) -> Tensor:
    damped = factor + 1e-4 * torch.eye(len(factor), device=factor.device)
    values, vectors = torch.linalg.eigh(damped)
    root = vectors @ torch.diag(values.clamp_min(1e-6) ** -0.25) @ vectors.T
    return root @ change if dim == 0 else change @ root


class TensorNorm(Optimizer):
    """SGD with momentum whose step has the norm of its tensor; counts steps."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "num_steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["num_steps"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(param, dtype=torch.float64)
                state["momentum"].mul_(0.9).add_(param.grad)
                step = state["momentum"].to(param.dtype)
                scale = group["lr"] / group["num_steps"] * (param.norm() + 1)
                param.sub_(step / (step.norm() + 1e-6) * scale)


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adafactor(params: Any) -> Optimizer:
    return torch.optim.Adafactor(params, lr=0.05)


def muon(params: Any) -> Optimizer:
    return torch.optim.Muon(params, lr=0.05, weight_decay=0.1)


class BlockwiseAdam(Optimizer):
    """Adam with 8-bit state: a scale for each block of elements, as bitsandbytes'."""

    def __init__(self, params: Any, lr: float = 0.01, block_numel: int = 256) -> None:
        super().__init__(params, {"lr": lr, "block_numel": block_numel})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None or param.numel() == 0:
                    continue
                state, block_numel = self.state[param], group["block_numel"]
                grad = param.grad.reshape(-1)
                moments = {"first": grad, "second": grad.square()}
                for name, value in moments.items():
                    if name in state:
                        old = _dequantized(*state[name], block_numel)
                        moments[name] = torch.lerp(old, value, 0.1)
                    state[name] = _quantized(moments[name], block_numel)
                change = moments["first"] / (moments["second"].sqrt() + 1e-4)
                param.sub_(group["lr"] * change.view_as(param))


def _quantized(values: Tensor, block_numel: int) -> tuple[Tensor, Tensor]:
    blocks = values.split(block_numel)
    scales = torch.stack([block.abs().max().clamp_min(1e-30) for block in blocks])
    codes = [(b / s * 127).round() for b, s in zip(blocks, scales, strict=True)]
    return torch.cat(codes).to(torch.int8), scales


def _dequantized(codes: Tensor, scales: Tensor, block_numel: int) -> Tensor:
    blocks = codes.to(scales.dtype).split(block_numel)
    return torch.cat([b / 127 * s for b, s in zip(blocks, scales, strict=True)])


ANY_SHAPE: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": sgd,
    "adafactor": adafactor,
    "shampoo": Shampoo,
    "norm": TensorNorm,
}
