"""A whole training step, captured in a CUDA graph, for models of either API.

Note [Steps of a captured step]
Every call is one step of training, so no batch is lost and none is used twice: the
first calls run as usual, on a stream of their own; then a call captures, which computes
nothing, and replays for its batch; later calls replay. A step clears the gradients
before and after, so that a replay, of which Python sees nothing, leaves what it found:
units at rest and no gradients. Parameters and the optimizer's state change in their
memory, which the graph knows by address.
"""

import atexit
import contextlib
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from fsdp_c import _native
from fsdp_c._capture.checks import (
    check_model,
    check_optimizer,
    check_optimizer_state,
    groups_that_step,
    hyperparameters,
    memory_of,
    prepare_nccl,
)
from fsdp_c._engines.models import engines_in, reset, units_in
from fsdp_c._units.collectives import on_any_rank


class CapturedStep:
    """A step of training that replays a graph; see :func:`capture_step`."""

    def __init__(
        self,
        train_step: Callable[..., Any],
        model: nn.Module,
        optimizer: Optimizer,
        warmup: int,
    ) -> None:
        self._train_step = train_step
        self._model = model
        self._optimizer = optimizer
        self._warmup = warmup
        self._num_warm = 0
        self._graph: _Graph | None = None
        self._device = units_in(model)[0].device
        self._module = torch.get_device_module(self._device)
        self._stream = self._module.Stream()

    @property
    def is_captured(self) -> bool:
        """Whether calls replay a graph: after the warm-up, until a reset."""
        return self._graph is not None

    def __call__(self, *inputs: Any) -> Any:
        """Make one step of training; return what ``train_step`` returned.

        Tensors that it returns are overwritten by the next call.

        Raises:
            RuntimeError: The step cannot be captured; the model is then as it was
                before the call. Or something that replays depend on has changed.
            ValueError: The inputs are not like those that were captured.
        """
        leaves, structure = tree_flatten(inputs)
        if self._graph is not None:
            return self._graph.replay(leaves, structure)
        leaves = [self._on_device(leaf) for leaf in leaves]
        if self._num_warm < self._warmup:
            self._num_warm += 1
            return self._run_aside(tree_unflatten(leaves, structure))
        self._graph = _Graph(self, leaves, structure)
        return self._graph.replay(leaves, structure)

    def reset(self) -> None:
        """Let the graph and its memory go; the next calls warm up and capture anew."""
        graph, self._graph, self._num_warm = self._graph, None, 0
        if graph is not None:
            graph.close()

    def _on_device(self, leaf: Any) -> Any:
        return leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf

    def _run_aside(self, inputs: Any) -> Any:
        current = self._module.current_stream()
        self._stream.wait_stream(current)
        try:
            with self._module.stream(self._stream):
                return self._run(inputs)
        finally:
            current.wait_stream(self._stream)

    def _run(self, inputs: Any) -> Any:
        """Make the step as it is, on the current stream."""
        self._clear_gradients()
        result = self._train_step(*inputs)
        self._clear_gradients()
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    def _clear_gradients(self) -> None:
        """Clear the gradients of the model, and of whatever the optimizer steps."""
        self._model.zero_grad(set_to_none=True)
        self._optimizer.zero_grad(set_to_none=True)


class _Graph:
    """One captured graph: what it reads and writes, and what it was captured of."""

    _graph: Any = None

    def __init__(self, owner: CapturedStep, leaves: list[Any], structure: Any) -> None:
        self._owner = weakref.proxy(owner)  # no cycle: it is freed once it is dropped
        self._module = owner._module
        self._structure = structure
        self._static = [
            leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        self._engines = engines_in(owner._model)
        self._params = list(owner._model.parameters())
        self._graph = self._module.CUDAGraph()
        self._outputs: Any = None
        _keep_until_exit(self)
        failure: BaseException | None = None
        try:
            self._capture()
        except BaseException as error:
            failure = error
        if not self._is_fine_everywhere(failure is None):
            self._give_up()
            _raise_failure(failure)
        self._facts = self._find_facts()

    def _capture(self) -> None:
        owner = self._owner
        check_optimizer_state(owner._optimizer, owner._device)
        prepare_nccl()
        before = hyperparameters(owner._optimizer), len(owner._optimizer.state)
        self._each(_native.BEGIN_CAPTURE)
        gc.collect()  # what is freed inside the capture is freed for the graph alone
        self._module.synchronize()
        self._module.empty_cache()
        with self._module.stream(owner._stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._each(_native.FORK_LANES)
                inputs = tree_unflatten(self._static, self._structure)
                self._outputs = owner._run(inputs)
                self._each(_native.JOIN_LANES)
            except BaseException:  # raise this one, not an error of capture_end()
                with contextlib.suppress(RuntimeError):
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        self._each(_native.END_CAPTURE)
        if (hyperparameters(owner._optimizer), len(owner._optimizer.state)) != before:
            raise RuntimeError(
                f"{type(owner._optimizer).__name__} changes its param_groups, or adds "
                "to its state, in the step that was captured: a replay would do "
                "neither; pass a larger warmup, or train without capture_step"
            )

    def _each(self, stage: int) -> None:
        for engine in self._engines:
            engine.run_capture_stage(stage)

    def _is_fine_everywhere(self, is_fine: bool) -> bool:
        """Return whether all ranks could capture: replays need all of them."""
        is_bad = not is_fine
        device = self._owner._device
        for group in groups_that_step(self._owner._model):
            operation = "agreement on the capture of a step"
            (is_bad,) = on_any_rank([is_bad], group, device, operation)
        return not is_bad

    def _give_up(self) -> None:
        """Make the model as it was before the capture."""
        self._each(_native.END_CAPTURE)
        reset(self._owner._model)
        self._owner._clear_gradients()
        self.close()
        self._end_capture_of_random_numbers()

    def _end_capture_of_random_numbers(self) -> None:
        """Capture something: a capture that fails leaves torch 2.11's generators in it.

        Dropout would raise from then on.
        """
        graph = self._module.CUDAGraph()
        stream = self._module.stream(self._owner._stream)
        with contextlib.suppress(RuntimeError), stream:  # the failure itself is raised
            graph.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self._owner._device)
            graph.capture_end()

    def _find_facts(self) -> tuple[Any, ...]:
        """Find what replays depend on, besides the inputs."""
        owner = self._owner
        return (
            hyperparameters(owner._optimizer),
            id(owner._optimizer.state),
            memory_of(self._params),
            owner._model.training,
        )

    def replay(self, leaves: list[Any], structure: Any) -> Any:
        """Run the step for these inputs."""
        self._check_facts()
        self._take(leaves, structure)
        if any(param.grad is not None for param in self._params):
            self._owner._clear_gradients()
        self._each(_native.BEGIN_REPLAY)
        self._graph.replay()
        self._each(_native.END_REPLAY)
        return self._outputs

    def _check_facts(self) -> None:
        names = ("param_groups", "state", "parameters", "training mode")
        remedies = (
            "make what changes a tensor on the device, as in AdamW(..., "
            "lr=torch.tensor(1e-3, device='cuda'), capturable=True)",
            "after load_state_dict() call reset() of the captured step",
            "call reset() of the captured step",
            "call model.train(), or reset() of the captured step",
        )
        now = self._find_facts()
        for name, remedy, old, new in zip(
            names, remedies, self._facts, now, strict=True
        ):
            if old != new:
                what = "model" if name in names[2:] else "optimizer"
                raise RuntimeError(
                    f"the {name} of the {what} changed since the step was captured, "
                    f"and a replay would not see it: {remedy}"
                )

    def _take(self, leaves: list[Any], structure: Any) -> None:
        """Copy the inputs to where the graph reads them."""
        if structure != self._structure:
            raise ValueError(
                f"the step was captured with inputs like {self._structure}, got "
                f"{structure}: capture a step for each kind of batch"
            )
        for index, (old, new) in enumerate(zip(self._static, leaves, strict=True)):
            if not isinstance(old, torch.Tensor):
                is_same = old is new or old == new
            else:
                is_same = isinstance(new, torch.Tensor) and (
                    (old.shape, old.dtype) == (new.shape, new.dtype)
                )
            if not is_same:
                raise ValueError(
                    f"the step was captured with {_describe(old)} as input {index}, "
                    f"got {_describe(new)}: pad batches to one shape, or capture a "
                    "step for each"
                )
        for old, new in zip(self._static, leaves, strict=True):
            if isinstance(old, torch.Tensor):
                old.copy_(new.detach(), non_blocking=True)

    def close(self) -> None:
        """Let the graph go, and its memory with it, when no replay runs."""
        if self._graph is None or sys.is_finalizing():
            return
        graph, self._graph, self._outputs = self._graph, None, None
        self._module.synchronize()
        graph.reset()

    def __del__(self) -> None:
        self.close()


_live: "weakref.WeakSet[_Graph]" = weakref.WeakSet()


def _keep_until_exit(graph: _Graph) -> None:
    """Close it before the process leaves its groups: NCCL waits for live graphs."""
    if not _live:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _live.add(graph)


def _close_all() -> None:
    for graph in list(_live):
        graph.close()


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return repr(value)


def _raise_failure(failure: BaseException | None) -> None:
    if failure is None:
        raise RuntimeError(
            "the step was not captured in a graph, because another rank could not "
            "capture it: see its error"
        )
    if not isinstance(failure, Exception):
        raise failure
    raise RuntimeError(
        f"the step cannot be captured in a graph: {failure}\nThe model is as it was "
        "before this call. Inside a captured step the host must not wait for the "
        "device or branch on values that the device computes: no .item(), .cpu(), "
        "print() or `if` of a tensor, and no CPU tensors"
    ) from failure


def capture_step(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    warmup: int = 3,
) -> CapturedStep:
    """Capture a whole step of training in a CUDA graph, and replay it.

    ``train_step(*inputs)`` makes one step: forward, backward, ``optimizer.step()``.
    The result is called instead of it, with the same arguments. Its first ``warmup``
    calls run ``train_step``; the next one captures it, all-gathers and reductions
    included; from then on a call copies its inputs to where the graph reads them and
    launches the graph. No Python runs between the kernels. Each call is one step, so
    training is the same to the bit.

    Gradients are cleared before and after each step: clip or log them inside
    ``train_step``. What a graph cannot follow is refused, each with a remedy. Not
    noticed are branches of ``train_step`` or of the model that depend on Python
    values: the graph repeats the ones that it was captured with.

    Where one rank cannot capture, all ranks of the model's groups and of its tensor
    parallel meshes raise. The stages of a pipeline are not among them: a rank of
    another stage would wait for this one.

    It ran on one H100 with FSDP1's API, on one and two ranks; not on several GPUs.

    Args:
        train_step: Takes tensors, or nested lists, tuples and dicts of them; shapes
            and dtypes are the same in each call, as are other values. May return
            tensors, on which the next call writes.
        model: A sharded module, of either API, or one that contains some. All its
            units are on the current CUDA device.
        optimizer: Steps inside ``train_step``, with ``capturable=True`` where it has
            that option.
        warmup: How many calls run as usual first, >= 1.

    Raises:
        TypeError: ``model`` is not a module, or ``optimizer`` no optimizer.
        ValueError: Nothing in ``model`` is sharded, or ``warmup`` is too small.
        RuntimeError: Steps of this model or optimizer cannot be captured.

    Example:
        >>> def train_step(x, y):  # doctest: +SKIP
        ...     loss = F.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> step = fsdp_c.capture_step(train_step, model, optimizer)  # doctest: +SKIP
        >>> for x, y in batches:  # doctest: +SKIP
        ...     loss = step(x, y)
    """
    if warmup < 1:
        raise ValueError(f"warmup must be at least 1, got {warmup}")
    check_model(model)
    check_optimizer(optimizer, units_in(model)[0].device)
    return CapturedStep(train_step, model, optimizer, warmup)
