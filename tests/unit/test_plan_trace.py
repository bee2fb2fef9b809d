"""What a step of a model holds on meta, from the creation of each tensor to its end.

Sizes are multiples of 512 bytes, as torch's allocator makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fsdp_c.tools.plan._ledger import Change, Ledger
from fsdp_c.tools.plan._recorder import trace_step
from fsdp_c.tools.plan._trace import Entry, Inputs, StepTrace

WIDTH, TOKENS = 64, 32
ROW = TOKENS * WIDTH * 4  # bytes of an activation
MATRIX = WIDTH * WIDTH * 4  # of a parameter


def empty(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


# The ledger ---------------------------------------------------------------------


def test_a_ledger_follows_storages_to_their_end() -> None:
    ledger = Ledger()
    a, b = empty(1), empty(1024)
    ledger.add(a)
    ledger.add(b)
    ledger.add(b[3:])  # no other storage
    assert ledger.change() == Change(512 + 1024, 512 + 1024)
    view = b[3:]
    del b
    assert ledger.change() == Change(0, 0)
    del view
    c = empty(512)
    ledger.add(c)
    del c
    assert ledger.change() == Change(-1024, 0)
    d = empty(2048)
    ledger.add(d)
    del d
    assert ledger.change() == Change(0, 2048)
    assert ledger.held == 512


def test_a_ledger_lets_others_count() -> None:
    ledger = Ledger()
    a, b = empty(512), empty(512)
    ledger.add(a, counts=False)
    ledger.add(b)
    ledger.take_over(b)
    assert ledger.change() == Change(0, 512)
    del a, b
    assert ledger.held == 0


# Steps --------------------------------------------------------------------------


class Block(nn.Module):
    """One matrix; keeps its input and the output of relu."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Checkpointed(Block):
    """Recomputes itself."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Loss(nn.Module):
    """Two blocks, and the mean of what they make."""

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.a, self.b = kind(), kind()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).mean()


def trace(model: nn.Module, *inputs: Tensor, **options: Any) -> StepTrace:
    with torch.device("meta"):
        made = model.to("meta")
    values = inputs or (torch.empty(TOKENS, WIDTH, device="meta"),)
    return trace_step(made, Inputs(values), TOKENS, **options)


def held(entries: Sequence[Entry], begin: int = 0) -> list[int]:
    """Return what is held behind each entry."""
    sums = accumulate((entry.change.nbytes for entry in entries), initial=begin)
    return list(sums)[1:]


def most(entries: Sequence[Entry], begin: int = 0) -> int:
    """Return the most that is held."""
    before = [begin, *held(entries, begin)]
    return max(
        at + e.change.peak_nbytes for at, e in zip(before, entries, strict=False)
    )


def words(entries: Sequence[Entry]) -> list[str]:
    """Return the entries but for work."""
    return [f"{e.kind} {e.name}".strip() for e in entries if e.kind != "work"]


def test_what_a_step_holds() -> None:
    found = trace(Loss())
    assert found.no_forward == found.no_backward == ""
    # Forward leaves the batch, and both relus' outputs; the loss is one number. The
    # product is there beside the output that relu makes of it.
    end = held(found.forward)[-1]
    assert end == 3 * ROW + 512
    assert most(found.forward) == 4 * ROW
    # In the backward of b's matrix there are the gradients of its output, its input and
    # itself, and of the loss; the output of relu has gone.
    gradients = [e.change for e in found.backward if e.kind == "use"]
    assert gradients == [Change(-MATRIX, 0), Change(-MATRIX, 0)]
    assert held(found.backward, end)[-1] == 0
    assert most(found.backward, end) == end - ROW + 2 * ROW + MATRIX + 512


BACKWARD = [
    "leave",
    "leave b",
    "leave b.linear",
    "use b.linear.weight",
    "enter b.linear",
    "enter b",
    "leave a",
    "leave a.linear",
    "use a.linear.weight",
]


def test_the_order_of_a_step() -> None:
    """Inputs have their gradients before what made them comes."""
    found = trace(Loss())
    forward = ["enter", "enter a", "enter a.linear", "leave a.linear", "leave a"]
    assert words(found.forward)[:5] == forward
    assert words(found.backward) == BACKWARD


@pytest.mark.parametrize("is_own", [False, True])
def test_recomputation(is_own: bool) -> None:
    """By the model itself or by the plan: the same bytes, and one forward more."""
    if is_own:
        found = trace(Loss(Checkpointed))
    else:
        found = trace(Loss(), recomputed=["a", "b"])
    end = held(found.forward)[-1]
    assert end == 2 * ROW + 512  # both inputs
    plain = trace(Loss())
    assert held(plain.forward)[-1] - end == ROW
    more = [sum(e.flops for e in each.backward) for each in (found, plain)]
    assert more[0] - more[1] == 2 * TOKENS * WIDTH * WIDTH * 2
    assert held(found.backward, end)[-1] == 0
    assert words(found.backward)[:2] == ["leave", "leave b"]
    assert words(found.forward) == words(plain.forward)


def test_what_another_module_keeps_is_counted_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            return (self.a(x) + self.b(x)).sum()

    found = trace(Twice())
    # The batch, and what both matrices need: neither the sum nor the products.
    assert held(found.forward)[-1] == 2 * ROW + 512
    assert [sum(e.saved) for e in found.forward if e.saved] == [ROW]
    assert words(found.backward).count("use a.weight") == 1


def test_saved_tensors_are_read_once() -> None:
    found = trace(Loss())
    saved = [i for i, entry in enumerate(found.forward) if entry.saved]
    assert [sum(found.forward[i].saved) for i in saved] == [ROW, ROW]
    reads = [entry.reads for entry in found.backward if entry.reads is not None]
    assert reads == saved[::-1]


def test_inputs_and_parameters_are_cast() -> None:
    """The batch is the caller's; its cast is there for the backward of the matrix."""
    found = trace(Block(), param_dtype=torch.bfloat16)
    assert held(found.forward)[-1] == ROW + ROW // 2 + ROW // 2 + 512
    gradients = [e.change.nbytes for e in found.backward if e.kind == "use"]
    assert gradients == [-MATRIX // 2]


def test_an_unused_parameter_gets_no_gradient() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    uses = [e.name for e in trace(Partly()).backward if e.kind == "use"]
    assert uses == ["used.linear.weight"]


def test_the_loss() -> None:
    """Its logits are in fp32, and so is what its softmax keeps."""

    class Predicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 1000, bias=False)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.head(x)
            return {
                "logits": logits,
                "loss": functional.cross_entropy(logits.float(), labels),
            }

    x = torch.empty(TOKENS, WIDTH, device="meta")
    labels = torch.empty(TOKENS, device="meta", dtype=torch.long)
    found = trace(Predicts(), x, labels, param_dtype=torch.bfloat16)
    logits = TOKENS * 1000 * 2 // 512 * 512 + 512 * (TOKENS * 2000 % 512 > 0)
    batch = ROW + 512
    end = held(found.forward)[-1]
    # The caller has the logits while backward runs.
    assert end == batch + ROW // 2 + logits + 2 * logits + 2 * 512
    assert most(found.backward, end) >= end + 2 * logits + logits
    assert held(found.backward, end)[-1] == 0


def test_fused_kernels() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(self.norm(x), 0.5)

    originals = functional.rms_norm, functional.dropout
    found = trace(Fused())
    assert originals == (functional.rms_norm, functional.dropout)
    # The batch, a factor a row, dropout's output and mask, and the loss.
    assert held(found.forward)[-1] == ROW + 512 + ROW + ROW // 4 + 512
    assert [e.name for e in found.backward if e.kind == "use"] == ["norm.weight"]


# What does not run on meta --------------------------------------------------------


class Fails(torch.autograd.Function):
    """Has a forward only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RuntimeError("no backward here")


class Failing(Loss):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Fails.apply(self.a(x))).mean()


def test_a_backward_that_fails_is_forward_in_reverse() -> None:
    found = trace(Failing())
    assert found.no_forward == ""
    assert "RuntimeError: no backward here" in found.no_backward
    assert held(found.forward)[-1] == 4 * ROW + 512
    assert held(found.backward, 4 * ROW + 512)[-1] == 0
    assert words(found.backward) == BACKWARD


def test_hooks_are_as_before() -> None:
    model = Failing()
    trace(model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
