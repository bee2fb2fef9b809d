"""What a forward does, in order: modules entered, parameters used, work, activations.

A forward on the meta device tells it without memory or computation. Where there are
no inputs, or the model cannot run there, the order is that of the module tree, and
the work two operations for each element of a matrix and token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fsdp_c.plan._units import without_warnings


class ForwardEntry(NamedTuple):
    """One thing that a forward does."""

    kind: Literal["enter", "use", "work", "leave"]
    name: str = ""  # of a module, or of a parameter
    flops: int = 0  # of work
    nbytes: int = 0  # of work: activations kept; of enter: the module's inputs
    storages: tuple[int, ...] = ()  # of work: their bytes, without the inputs'


@dataclass
class ForwardTrace:
    """A forward.

    Attributes:
        entries: In the order of execution.
        num_tokens: Elements of the first integer input, or batch times sequence.
        has_activations: Whether ``entries`` know what autograd keeps.
        why: Why the model did not run on meta; empty if it did.
    """

    entries: list[ForwardEntry] = field(default_factory=list)
    num_tokens: int = 0
    has_activations: bool = False
    why: str = ""

    @property
    def flops(self) -> int:
        """Floating-point operations of one forward."""
        return sum(entry.flops for entry in self.entries)


class Inputs(NamedTuple):
    """How forward is called."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


def trace_forward(
    model: nn.Module, inputs: Inputs | None, num_tokens: int
) -> ForwardTrace:
    """Return what a forward of ``model`` does; run it on meta if that is possible.

    Args:
        model: Not wrapped, on the meta device, in the dtypes of forward. Its hooks
            are as before after it.
        inputs: On the meta device. None: there are none.
        num_tokens: What one forward works on where there are no inputs.
    """
    if inputs is None:
        why = "no inputs are known (the factory returned none)"
        return _by_tree(model, num_tokens, why)
    try:
        return _Recorder(model).run(inputs, num_tokens)
    except Exception as error:
        text = str(error).strip().splitlines()
        first = f"{type(error).__name__}: {text[0] if text else ''}"
        return _by_tree(
            model, num_tokens, f"its forward does not run on meta ({first})"
        )


# By the module tree -----------------------------------------------------------


def _by_tree(model: nn.Module, num_tokens: int, why: str) -> ForwardTrace:
    trace = ForwardTrace(num_tokens=num_tokens, why=why)
    seen: set[nn.Parameter] = set()

    def visit(name: str, module: nn.Module) -> None:
        trace.entries.append(ForwardEntry("enter", name))
        flops = 0
        prefix = f"{name}." if name else ""
        for child, param in module._parameters.items():
            if param is None:
                continue
            if param.ndim > 1 and not isinstance(module, nn.Embedding):
                flops += 2 * param.numel() * num_tokens
            if param not in seen:
                seen.add(param)
                trace.entries.append(ForwardEntry("use", prefix + child))
        if flops:
            trace.entries.append(ForwardEntry("work", flops=flops))
        for child, inner in module._modules.items():
            if inner is not None:
                visit(prefix + child, inner)
        trace.entries.append(ForwardEntry("leave", name))

    visit("", model)
    return trace


# By running it ----------------------------------------------------------------


class _FusedAttention(torch.autograd.Function):
    """The shapes of a fused attention kernel, which keeps no matrix of weights."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output's shape; keep what such a kernel keeps."""
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[None, None, None]:
        """Never run: a plan has no backward of tensors."""
        raise NotImplementedError


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets ``item()`` and ``bool()`` of meta tensors return 1 or True.

    Models read their inputs to see, for example, whether a mask hides anything. The
    answers are those of inputs without padding.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            dtype = args[0].dtype
            if dtype.is_floating_point:
                return 1.0
            return True if dtype is torch.bool else 1
        return func(*args, **(kwargs or {}))


class _Recorder:
    """One forward on meta, watched."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trace = ForwardTrace(has_activations=True)
        self._names = {param: name for name, param in model.named_parameters()}
        self._used: set[nn.Parameter] = set()
        # Storages whose bytes are counted, or are no activations; kept alive, so
        # that no other has the same identity.
        self._storages: dict[int, Any] = {}
        self._kept_nbytes = 0
        self._kept_storages: list[int] = []
        self._inputs: frozenset[int] = frozenset()  # storages of the caller's tensors
        self._attention_flops = 0
        self._counted_flops = 0
        self._flops = FlopCounterMode(display=False)

    def run(self, inputs: Inputs, num_tokens: int) -> ForwardTrace:
        """Run the model; return what it did.

        Raises:
            Exception: What its forward raises.
        """
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._note_storage(tensor)
        leaves = [x for x in tree_leaves(dict(inputs.kwargs)) if torch.is_tensor(x)]
        leaves += [x for x in tree_leaves(inputs.args) if torch.is_tensor(x)]
        self._inputs = frozenset(x.untyped_storage()._cdata for x in leaves)
        self._trace.num_tokens = num_tokens or max(
            (x.numel() for x in leaves if not x.is_floating_point()), default=0
        )
        with ExitStack() as stack:
            stack.enter_context(without_warnings())
            for name, module in self._model.named_modules():
                self._watch(stack, name, module)
            stack.enter_context(_attention_as(self._attend))
            stack.enter_context(
                torch.autograd.graph.saved_tensors_hooks(self._keep, lambda x: x)
            )
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._flops)
            stack.enter_context(_Answers())  # type: ignore[no-untyped-call]
            self._model(*inputs.args, **inputs.kwargs)
        self._use_the_rest()
        return self._trace

    def _watch(self, stack: ExitStack, name: str, module: nn.Module) -> None:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._flush()
            nbytes = sum(
                x.nbytes
                for x in tree_leaves((args, kwargs))
                if torch.is_tensor(x) and x.requires_grad
            )
            self._trace.entries.append(ForwardEntry("enter", name, nbytes=nbytes))
            for param in module._parameters.values():
                if param is not None:
                    self._use(param, self._trace.entries)

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._flush()
            self._trace.entries.append(ForwardEntry("leave", name))

        before = module.register_forward_pre_hook(enter, with_kwargs=True)
        after = module.register_forward_hook(leave)
        stack.callback(before.remove)
        stack.callback(after.remove)

    def _use(self, param: nn.Parameter, entries: list[ForwardEntry]) -> None:
        if param not in self._used:
            self._used.add(param)
            entries.append(ForwardEntry("use", self._names[param]))

    def _flush(self) -> None:
        total = self._flops.get_total_flops() + self._attention_flops
        flops, nbytes = total - self._counted_flops, self._kept_nbytes
        if flops or nbytes:
            self._trace.entries.append(
                ForwardEntry(
                    "work",
                    flops=flops,
                    nbytes=nbytes,
                    storages=tuple(self._kept_storages),
                )
            )
        self._counted_flops = total
        self._kept_nbytes = 0
        self._kept_storages = []

    def _note_storage(self, tensor: Tensor) -> bool:
        """Return whether the tensor's storage is a new one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return False
        self._storages[key] = storage
        return True

    def _keep(self, tensor: Tensor) -> Tensor:
        if self._note_storage(tensor):
            storage = tensor.untyped_storage()
            self._kept_nbytes += storage.nbytes()
            if storage._cdata not in self._inputs:
                self._kept_storages.append(storage.nbytes())
        return tensor

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Two products, of queries with keys and of weights with values.
        scores = query.shape[:-1].numel() * key.shape[-2]
        self._attention_flops += 2 * scores * (query.shape[-1] + value.shape[-1])
        # Typed in some versions of torch only.
        apply: Callable[..., Tensor] = _FusedAttention.apply
        return apply(query, key, value)

    def _use_the_rest(self) -> None:
        """Let parameters whose modules were not called be used where they stand.

        A module may use what is in its children without calling them.
        """
        first: dict[str, int] = {}
        for i, entry in enumerate(self._trace.entries):
            if entry.kind == "enter":
                first.setdefault(entry.name, i)
        insertions: dict[int, list[ForwardEntry]] = {}
        for param, name in self._names.items():
            path = name.rpartition(".")[0]
            while path not in first:  # the root, "", is
                path = path.rpartition(".")[0]
            self._use(param, insertions.setdefault(first[path], []))
        for at in sorted(insertions, reverse=True):
            self._trace.entries[at + 1 : at + 1] = insertions[at]


@contextmanager
def _attention_as(attend: Any) -> Iterator[None]:
    """Let ``scaled_dot_product_attention`` be a fused kernel meanwhile."""
    original = functional.scaled_dot_product_attention

    def replacement(
        query: Tensor, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any
    ) -> Tensor:
        output: Tensor = attend(query, key, value)
        return output

    functional.scaled_dot_product_attention = replacement
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original
