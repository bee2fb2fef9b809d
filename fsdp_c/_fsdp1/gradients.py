"""What FullyShardedDataParallel does with gradients: no_sync, hooks, clipping."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsdp_c import _native
from fsdp_c._engines.engine import ensure_engine, shards_shown
from fsdp_c._engines.in_backward import (
    adopt_in_backward_optimizers,
    check_no_optimizer,
)
from fsdp_c._fsdp1.attributes import Attributes
from fsdp_c._fsdp1.parallel_norm import clip_parallel
from fsdp_c._state.parts import find_parts
from fsdp_c._units.base import sharded_modules
from fsdp_c._units.groups import HYBRID
from fsdp_c._units.params import unsharded_params


class GradientMethods(Attributes):
    """FSDP1's methods about gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also those that are on no registered parameter.

        Between a forward and its backward whole DTensors may stand in the place of
        tensor parallel parameters, which keep the gradients meanwhile.

        Args:
            set_to_none: False: fill them with zeros instead.
        """
        super().zero_grad(set_to_none)
        for each in sharded_modules(self):
            for param in each._sharded.originals.parallel.cuts:
                if set_to_none or param.grad is None:
                    param.grad = None
                else:
                    param.grad.detach().zero_()

    @contextmanager
    def no_sync(self, *, sharded: bool = False) -> Iterator[None]:
        """Let backward accumulate gradients without reducing them to the mean.

        The first backward after the context does that. For the root only.

        Args:
            sharded: False: keep whole gradients, without communication (FSDP1's
                meaning; memory of the whole model's gradients in the parameters'
                dtype; their sum is cast when it is reduced). True: sum them over the
                sharding group in every backward and keep only this rank's part, in
                reduce dtype; replicas (HYBRID_SHARD) communicate once, in the first
                backward after the context.

        Raises:
            RuntimeError: Called on a nested wrapped module, or inside a step.
        """
        self._ensure_root("no_sync")
        self._assert_idle("no_sync")
        engine = ensure_engine(self)
        before = engine.sync
        engine.sync = _native.SYNC_SHARD if sharded else _native.SYNC_NONE
        try:
            yield
        finally:
            engine.sync = before

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let ``hook`` reduce the gradients, in place of the unit's own reduction.

        For every unit and backward it is called with a segment's unsharded gradient
        in reduce dtype (1-D, padding included, of this rank's batch): with NO_SHARD
        as ``hook(state, grad)``, which leaves the result in ``grad``; else as
        ``hook(state, grad, output)``, which leaves this rank's piece in ``output``
        (1-D, ``grad.numel() / world_size`` elements). It does its own scaling. The
        hooks of ``torch.distributed.algorithms._comm_hooks.default_hooks`` fit.

        Args:
            state: Passed on to the hook.
            hook: Runs on autograd's thread.

        Raises:
            AssertionError: Called on a nested wrapped module, with a hybrid strategy,
                or a hook is registered already.
            RuntimeError: A unit holds gradients of a ``no_sync()`` backward.
            ValueError: ``hook`` is not callable.
        """
        if not callable(hook):
            raise ValueError(
                f"The communication hook must be callable but got {hook!r}"
            )
        if not self.check_is_root():
            raise AssertionError(
                "register_comm_hook can only be called on a root instance."
            )
        modules = list(sharded_modules(self))
        for each in modules:
            strategy = each._sharded.config.sharding_strategy
            if strategy in HYBRID:
                raise AssertionError(
                    "Communication hook is not supported for hybrid strategies: "
                    f"{strategy}: unit {each._sharded.name!r} reduces "
                    "over two groups, a hook over one"
                )
            if each._comm_hook is not None:
                raise AssertionError("A communication hook is already registered")
            if each._sharded.unit.holds_grads:
                raise RuntimeError(
                    f"unit {each._sharded.name!r} holds gradients of a no_sync() "
                    "backward: register the hook before the first step"
                )
        for each in modules:
            each.adopt_comm_hook(state, hook)

    def clip_grad_norm_(
        self, max_norm: float | int, norm_type: float | int = 2.0
    ) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``.

        The norm is that of the unsharded model's gradients as one vector, computed
        in fp32. Gradients of ignored parameters are counted on each rank for
        itself. All ranks must call it, on the root, between backward and the
        optimizer's step.

        Args:
            max_norm: Highest norm that stays as it is.
            norm_type: The p of the norm, > 0; ``inf`` for the largest element.

        Returns:
            The norm before scaling, 0-dim.

        Raises:
            RuntimeError: Called on a nested wrapped module, or inside a step.
            TypeError: One of them is not a number.
            ValueError: ``norm_type`` is not > 0, or ``max_norm`` is NaN.

        Source:
            ``FullyShardedDataParallel.clip_grad_norm_`` (torch 2.13).
        """
        self._ensure_root("clip_grad_norm_")
        self._assert_idle("clip_grad_norm_")
        try:
            limit, power = float(max_norm), float(norm_type)
        except (TypeError, ValueError) as error:
            raise TypeError(
                "max_norm and norm_type must be numbers, got "
                f"{max_norm!r} and {norm_type!r}"
            ) from error
        if not power > 0:
            raise ValueError(
                f"norm_type must be > 0 or infinity, got {norm_type!r}: 2.0 is usual"
            )
        if math.isnan(limit):
            raise ValueError(f"max_norm must be a number, got {max_norm!r}")
        for each in sharded_modules(self):
            each._sharded.originals.check()
            adopt_in_backward_optimizers(each)
        check_no_optimizer(self, "clip_grad_norm_()")
        with shards_shown(self), torch.no_grad():
            held = [p for p in self.parameters() if p.requires_grad and p.numel() > 0]
            if held and all(param.grad is None for param in held):
                warnings.warn(
                    f"clip_grad_norm_() was called on rank {self.rank} with no "
                    "gradients -- returning the total norm in the default dtype "
                    f"{torch.float32}: call it after backward",
                    stacklevel=2,
                )
            if any(each._sharded.originals.parallel for each in sharded_modules(self)):
                return clip_parallel(find_parts(self).values(), limit, power)
            unsharded = (param for _, param in unsharded_params(self, frozenset()))
            others = [param for param in unsharded if param.grad is not None]
            return ensure_engine(self).clip_grad_norm(others, limit, power)
