"""What a step of a model does, in order: modules entered and left, gradients, work.

A forward and a backward on the meta device tell it without memory or computation. What
cannot run there is derived: without a backward, it is forward in reverse; without a
forward, the order is that of the module tree, and the work two operations for each
element of a matrix and token.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import nn

from fsdp_c.tools.plan._ledger import Change

# Operations of backward for each of forward, where it is not run.
BACKWARD_FACTOR = 2


class Entry(NamedTuple):
    """One thing that a forward or a backward does.

    In backward "leave" says that the outputs of a module have their gradients, "enter"
    that its inputs have theirs, and "use" that a parameter has its own.
    """

    kind: Literal["enter", "use", "work", "leave"]
    name: str = ""  # of a module, or of a parameter
    flops: int = 0  # of work
    change: Change = Change()  # of work and use: of what activations hold
    # Of work in forward: bytes of each storage that autograd saves in it, but for the
    # inputs'.
    saved: tuple[int, ...] = ()
    # Of work in backward: the entry of forward that saved what it needs first from here
    # on. None: there is none.
    reads: int | None = None
    requires_grad: bool = False  # of leave in forward: the outputs do


@dataclass(frozen=True)
class StepTrace:
    """A forward and a backward, in the order of execution."""

    forward: tuple[Entry, ...] = ()
    backward: tuple[Entry, ...] = ()
    num_tokens: int = 0  # elements of the first integer input, or batch times sequence
    # Why forward did not run on meta, and activations are not known; empty if it did.
    no_forward: str = ""
    no_backward: str = ""  # likewise, why backward is forward in reverse

    @property
    def flops(self) -> int:
        """Floating-point operations of one forward."""
        return sum(entry.flops for entry in self.forward)


class Inputs(NamedTuple):
    """How forward is called."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


# Where there is no forward ------------------------------------------------------


def trace_of_tree(model: nn.Module, num_tokens: int, why: str) -> StepTrace:
    """Return a step whose forward calls every module where it stands in the tree.

    ``num_tokens`` are what it works on; ``why`` says why it did not run.
    """
    entries: list[Entry] = []
    has_grad = False

    def visit(name: str, module: nn.Module) -> None:
        nonlocal has_grad
        entries.append(Entry("enter", name))
        flops = 0
        prefix = f"{name}." if name else ""
        for param in module._parameters.values():
            if param is None:
                continue
            has_grad = has_grad or param.requires_grad
            if param.ndim > 1 and not isinstance(module, nn.Embedding):
                flops += 2 * param.numel() * num_tokens
        if flops:
            entries.append(Entry("work", flops=flops))
        for child, inner in module._modules.items():
            if inner is not None:
                visit(prefix + child, inner)
        entries.append(Entry("leave", name, requires_grad=has_grad))

    visit("", model)
    return StepTrace(tuple(entries), num_tokens=num_tokens, no_forward=why)


# Where there is no backward -----------------------------------------------------


def with_mirrored_backward(
    trace: StepTrace, model: nn.Module, recomputed: Collection[str], why: str
) -> StepTrace:
    """Return ``trace`` with a backward that is its forward in reverse.

    It runs the forwards of the modules ``recomputed`` again; ``why`` says why it was
    not recorded.
    """
    uses = _first_uses(model, trace.forward)
    again = _recomputed_flops(trace.forward, recomputed)
    has_grad = [False]  # before each entry
    for index in range(len(trace.forward)):
        has_grad.append(has_grad[-1] or index in uses)
    backward: list[Entry] = []
    for index in reversed(range(len(trace.forward))):
        entry = trace.forward[index]
        if entry.kind == "leave" and entry.requires_grad:
            backward.append(Entry("leave", entry.name))
            if index in again:
                backward.append(Entry("work", flops=again[index]))
        elif entry.kind == "work":
            nbytes = -entry.change.nbytes
            backward.append(
                Entry(
                    "work",
                    flops=BACKWARD_FACTOR * entry.flops if has_grad[index] else 0,
                    change=Change(nbytes, max(0, nbytes)),
                    reads=index if entry.saved else None,
                )
            )
        elif entry.kind == "enter":
            backward += [Entry("use", name) for name in reversed(uses.get(index, []))]
            if has_grad[index]:
                backward.append(Entry("enter", entry.name))
    return replace(trace, backward=tuple(backward), no_backward=why)


def _first_uses(model: nn.Module, entries: Sequence[Entry]) -> dict[int, list[str]]:
    """Return the trainable parameters by the "enter" after which they are used first.

    A module may use what is in its children without calling them: a parameter of a
    module that was not called is used by the module around it.
    """
    first: dict[str, int] = {}
    for index, entry in enumerate(entries):
        if entry.kind == "enter":
            first.setdefault(entry.name, index)
    uses: dict[int, list[str]] = {}
    for name, param in model.named_parameters():
        path = name.rpartition(".")[0]
        while path not in first:  # the root, "", is
            path = path.rpartition(".")[0]
        if param.requires_grad:
            uses.setdefault(first[path], []).append(name)
    return uses


def _recomputed_flops(
    entries: Sequence[Entry], recomputed: Collection[str]
) -> dict[int, int]:
    """Return the operations inside recomputed modules, by the index of "leave"."""
    found = {}
    total, begins = 0, []
    for index, entry in enumerate(entries):
        total += entry.flops
        if entry.kind == "enter":
            begins.append(total)
        elif entry.kind == "leave":
            inside = total - begins.pop()
            if entry.name in recomputed:
                found[index] = inside
    return found
