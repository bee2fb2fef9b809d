"""Runs a forward and a backward of a model on meta, and writes down what they do."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from fsdp_c.tools.plan._fused import fused_kernels
from fsdp_c.tools.plan._ledger import Change, Ledger, plain_tensor
from fsdp_c.tools.plan._trace import (
    Entry,
    Inputs,
    StepTrace,
    trace_of_tree,
    with_mirrored_backward,
)
from fsdp_c.tools.plan._units import without_warnings


def trace_step(
    model: nn.Module,
    inputs: Inputs | None,
    num_tokens: int,
    *,
    param_dtype: torch.dtype | None = None,
    recomputed: Collection[str] = (),
) -> StepTrace:
    """Return what a step of ``model`` does; run it on meta if that is possible.

    The loss is what forward returns if that is one number, or its ``loss``; else the
    sum of all that it returns.

    Args:
        model: Not wrapped, on the meta device, in the dtypes of its shards. Its
            parameters are cast; its hooks are as before after it.
        inputs: On the meta device. None: there are none.
        num_tokens: What one forward works on where there are no inputs.
        param_dtype: Of floating parameters and inputs in forward. None: their own.
        recomputed: Names of modules that keep their inputs, and are run again in
            backward.
    """
    if inputs is None:
        why = "no inputs are known (the factory returned none)"
        trace = trace_of_tree(model, num_tokens, why)
        return with_mirrored_backward(trace, model, recomputed, why)
    if param_dtype is not None:
        _cast(model, param_dtype)
    recorder = _Recorder(model, param_dtype, recomputed)
    try:
        recorder.run(inputs)
    except Exception as error:
        why = f"does not run on meta ({_first_line(error)})"
        trace = recorder.trace(num_tokens)
        if not recorder.is_backward:
            trace = trace_of_tree(model, num_tokens, f"its forward {why}")
        return with_mirrored_backward(trace, model, recomputed, why)
    return recorder.trace(num_tokens)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    for param in model.parameters():
        if not param.is_floating_point():
            continue
        data = param.detach().to(dtype)
        if is_traceable_wrapper_subclass(param):  # what it wraps is not in its data
            swap_tensors(param, nn.Parameter(data, param.requires_grad))
        else:
            param.data = data


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


_THE_CALLER = -1  # holds what autograd saves of it


class _Operations(TorchDispatchMode):
    """Sees every operation: its tensors, and how many products it computes.

    ``item()`` and ``bool()`` of meta tensors return 1 or True. Models read their inputs
    to see, for example, whether a mask hides anything; the answers are those of inputs
    without padding.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._ledger = ledger

    def count(self, flops: int) -> None:
        """Add operations."""
        self.flops += flops

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # what they do with plain tensors is seen
        kwargs = kwargs or {}
        if types:  # of fake tensors, with which DTensor finds out its shapes
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            dtype = args[0].dtype
            if dtype.is_floating_point:
                return 1.0
            return True if dtype is torch.bool else 1
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        for each in tree_leaves(result):
            if torch.is_tensor(each) and each.is_meta:  # a fake one says "cpu"
                self._ledger.add(each)
        return result


@dataclass
class _Call:
    """One call of a module, seen from its inputs or its outputs."""

    name: str
    nodes: list[Any] = field(default_factory=list)  # that made the inputs
    missing: int | None = None  # gradients; None: none has come


class _Recorder:
    """One step on meta, watched."""

    def __init__(
        self,
        model: nn.Module,
        param_dtype: torch.dtype | None,
        recomputed: Collection[str],
    ) -> None:
        self._model = model
        self._param_dtype = param_dtype
        self._recomputed = recomputed
        self._forward: list[Entry] = []
        self._backward: list[Entry] = []
        self._num_tokens = 0
        self._ledger = Ledger()
        self._operations = _Operations(self._ledger)
        self._counted_flops = 0
        # Calls by what made their inputs, whose gradients have not come.
        self._waiting: dict[Any, list[_Call]] = {}
        self._saved: list[int] = []  # bytes of storages saved in the work now
        self._reads: int | None = None  # what the work now reads
        self._read: set[int | None] = {None, _THE_CALLER}  # what was read
        self.is_backward = False

    def trace(self, num_tokens: int) -> StepTrace:
        """Return what was recorded."""
        return StepTrace(
            tuple(self._forward), tuple(self._backward), num_tokens or self._num_tokens
        )

    def run(self, inputs: Inputs) -> None:
        """Run a step.

        Raises:
            Exception: What forward or backward raises; ``is_backward`` says which.
        """
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._ledger.add(tensor, counts=False)
        for tensor in filter(torch.is_tensor, tree_leaves(tuple(inputs))):
            self._ledger.add(tensor).saved_by = _THE_CALLER
            if not tensor.is_floating_point():
                self._num_tokens = max(self._num_tokens, tensor.numel())
        with ExitStack() as stack:
            stack.enter_context(without_warnings())
            modules = dict(self._model.named_modules())
            for name in self._recomputed:
                stack.enter_context(_checkpointed(modules[name]))
            for name, module in modules.items():
                self._watch(stack, name, module)
            for name, param in self._model.named_parameters():
                self._watch_param(stack, name, param)
            stack.enter_context(fused_kernels(self._operations.count))
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            stack.enter_context(hooks)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._operations)
            self._step(inputs)
        # What is there now, such as the batch, goes when the step is over.
        self._backward.append(Entry("work", change=Change(-self._ledger.held)))

    def _step(self, inputs: Inputs) -> None:
        result = self._call_model(inputs)
        loss = _loss_of(result)
        self._flush()
        self.is_backward = True
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        self._waiting.clear()
        del result, loss
        self._flush()

    def _call_model(self, inputs: Inputs) -> Any:
        args, kwargs = tree_map(self._cast, (inputs.args, dict(inputs.kwargs)))
        return self._model(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        """Cast an input as the root's forward does."""
        if torch.is_tensor(value) and value.is_floating_point():
            return value.to(self._param_dtype or value.dtype)
        return value

    def _flush(self) -> None:
        """End the work that goes on."""
        flops = self._operations.flops - self._counted_flops
        change = self._ledger.change()
        if flops or any(change) or self._saved or self._reads is not None:
            work = Entry(
                "work",
                flops=flops,
                change=change,
                saved=tuple(self._saved),
                reads=self._reads,
            )
            self._note(work)
        self._counted_flops = self._operations.flops
        self._saved, self._reads = [], None

    def _note(self, entry: Entry) -> None:
        (self._backward if self.is_backward else self._forward).append(entry)

    # Modules -------------------------------------------------------------------

    def _watch(self, stack: ExitStack, name: str, module: nn.Module) -> None:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.is_backward:
                return  # it runs again
            self._flush()
            self._note(Entry("enter", name))
            call = _Call(name)
            for tensor in _with_grad((args, kwargs)):
                node = tensor.grad_fn
                if node is not None:
                    call.nodes.append(node)
                    self._waiting.setdefault(node, []).append(call)
                    _hook(tensor, partial(self._receive, node))

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            if self.is_backward:
                return
            self._flush()
            tensors = _with_grad(output)
            self._note(Entry("leave", name, requires_grad=bool(tensors)))
            call = _Call(name)
            for tensor in tensors:
                _hook(tensor, partial(self._leave, call, tensor.grad_fn))

        before = module.register_forward_pre_hook(enter, with_kwargs=True)
        after = module.register_forward_hook(leave)
        stack.callback(before.remove)
        stack.callback(after.remove)

    def _receive(self, node: Any) -> None:
        """What ``node`` made has its gradient: some calls have all of theirs."""
        for call in reversed(self._waiting.pop(node, [])):  # the innermost first
            if call.missing is None:
                call.missing = sum(map(torch._C._will_engine_execute_node, call.nodes))
            call.missing -= 1
            if call.missing == 0:
                self._flush()
                self._note(Entry("enter", call.name))

    def _leave(self, call: _Call, node: Any) -> None:
        """An output of a call has its gradient. It is an input of what comes behind."""
        self._receive(node)
        if call.missing is None:  # the first output
            call.missing = 0
            self._flush()
            self._note(Entry("leave", call.name))

    # Tensors -------------------------------------------------------------------

    def _watch_param(self, stack: ExitStack, name: str, param: nn.Parameter) -> None:
        def take(_param: Tensor) -> None:
            self._flush()
            if param.grad is not None:
                self._ledger.take_over(param.grad)
            self._note(Entry("use", name, change=self._ledger.change()))
            param.grad = None

        if param.requires_grad:
            hook: Any = param.register_post_accumulate_grad_hook  # untyped
            stack.callback(hook(take).remove)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = self._ledger.add(tensor)
        if not self.is_backward and storage.nbytes and storage.saved_by is None:
            storage.saved_by = len(self._forward)  # where the work now will be
            self._saved.append(plain_tensor(tensor).untyped_storage().nbytes())
        return tensor

    def _unpack(self, tensor: Tensor) -> Tensor:
        saved_by = self._ledger.add(tensor).saved_by
        if saved_by not in self._read:
            self._flush()
            self._read.add(saved_by)
            self._reads = saved_by
        return tensor


def _hook(tensor: Tensor, call: Callable[[], None]) -> None:
    """Call it when the gradient of ``tensor`` is complete."""
    register: Any = tensor.register_hook  # untyped
    register(lambda _grad: call())


def _with_grad(values: Any) -> list[Tensor]:
    """Return the tensors in ``values`` that require grad, each once."""
    found = {id(x): x for x in tree_leaves(values) if torch.is_tensor(x)}
    return [tensor for tensor in found.values() if tensor.requires_grad]


def _loss_of(result: Any) -> Tensor | None:
    """Return what backward is called on; None: nothing requires grad."""
    named = result.get("loss") if isinstance(result, Mapping) else None
    loss = named if named is not None else getattr(result, "loss", result)
    if torch.is_tensor(loss) and loss.numel() == 1:
        return loss if loss.requires_grad else None
    sums = [tensor.sum() for tensor in _with_grad(result)]
    return torch.stack(sums).sum() if sums else None


@contextmanager
def _checkpointed(module: nn.Module) -> Iterator[None]:
    """Let the module recompute its forward in backward meanwhile."""
    forward = module.forward
    own = vars(module).get("forward")  # of this one, not of its class

    def recomputing(*args: Any, **kwargs: Any) -> Any:
        options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(forward, *args, **options, **kwargs)

    module.forward = recomputing
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
