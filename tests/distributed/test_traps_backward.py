"""Traps around backward: hooks that never fire, frozen units, prefetch.

What a number stands for is in tests/lint/test_traps.py.
"""

from typing import Any

import pytest
from torch import Tensor, nn

from helpers.distributed import TEST_DEVICE, distributed, every_strategy
from helpers.impl import BackwardPrefetch, assert_idle, memory_stats, unit_states
from helpers.models import DIM, Block, Chain, loss_of
from helpers.reference import Differential, with_model


class _Passes(Block):
    """A unit that hands its input on; on demand it uses its parameters."""

    uses_params = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.uses_params else x * 2.0


def _chain(block: type[nn.Module] = Block, num_blocks: int = 4) -> Chain:
    return Chain(block() for _ in range(num_blocks))


@pytest.mark.trap(1)
@every_strategy
@pytest.mark.parametrize("where", ["one unit", "all units"])
@distributed(world_size=(2, 3))
@with_model(lambda: _chain(_Passes), {_Passes})
def test_unit_gets_no_gradient(differential: Differential, where: str) -> None:
    """Pre-backward fires and no gradient comes: the unit is resharded all the same."""
    both: tuple[Any, ...] = (differential.reference, differential.model)
    for used in ((0, 1, 2, 3), () if where == "all units" else (0, 1, 3), (0, 1, 2, 3)):
        for model in both:
            for index, block in enumerate(model.blocks):
                getattr(block, "module", block).uses_params = index in used
        differential.zero_grad()
        differential.backward_of(lambda model, x: loss_of(model(x.requires_grad_())))
        assert_idle(differential.model)
        differential.checked_step()


class _Side(nn.Module):
    """A frozen unit whose output does not reach the loss, beside the main path."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.side = Block().requires_grad_(False)
        self.last = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.side(x)
        return self.last(x)


@pytest.mark.trap(1)
@pytest.mark.trap(2)
@every_strategy
@pytest.mark.parametrize("frozen", [True, False])
@distributed(world_size=(2, 3))
@with_model(_Side, {Block})
def test_unit_whose_output_is_dropped(differential: Differential, frozen: bool) -> None:
    """Its input gets a gradient, it has no backward: unsharded for nothing."""
    if not frozen:
        for model in (differential.reference, differential.model):
            model.requires_grad_(True)
    for _ in range(3):
        differential.zero_grad()
        differential.forward_backward()
        assert_idle(differential.model)
        differential.checked_step()
        # The frozen weights are replaced: a stale unsharded copy would show.
        differential.scale_params(0.9)


@pytest.mark.trap(3)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("input_requires_grad", [True, False])
@pytest.mark.parametrize("num_frozen", [0, 2])
@distributed(world_size=(2, 3))
def test_first_unit_without_a_gradient_of_its_input(
    num_frozen: int, input_requires_grad: bool, use_orig_params: bool
) -> None:
    """The units that run first are reduced and resharded whatever the input is."""

    def build() -> nn.Module:
        model = _chain()
        for block in model.blocks[:num_frozen]:
            block.requires_grad_(False)
        return model

    differential = Differential.of_units(
        build, {Block}, use_orig_params=use_orig_params
    )
    for _ in range(3):
        differential.zero_grad()
        before = memory_stats(differential.model)["num_reduces"]
        differential.backward_of(
            lambda model, x: loss_of(model(x.requires_grad_(input_requires_grad)))
        )
        assert_idle(differential.model)
        stats = memory_stats(differential.model)
        assert stats["num_reduces"] - before == 4 - num_frozen
        differential.checked_step()


class _Outer(nn.Module):
    """A unit whose own layer runs after the unit inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.after = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(x))


def _trace(model: Any) -> list[str]:
    """Return the collectives issued so far, the last ones at the end."""
    return model._engine.log().splitlines()


@pytest.mark.trap(9)
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST", None])
@distributed(world_size=2)
def test_backward_gathers_in_reverse_post_forward_order(prefetch: str | None) -> None:
    """A nested unit ends before the one around it: in backward it comes after it.

    Backward has not left the outer unit when the inner one begins, so what is
    prefetched at the end of a unit is the next outer one alone.
    """
    differential = Differential.of_units(
        lambda: _chain(_Outer, 2),
        {Block, _Outer},
        backward_prefetch=prefetch and BackwardPrefetch[prefetch],
    )
    differential.train(2)
    differential.zero_grad()
    mean, mine = differential.forward()
    num_before = len(_trace(differential.model))
    before = memory_stats(differential.model)
    mean.backward()
    mine.backward()
    lines = _trace(differential.model)[num_before:]
    gathered = [line.rpartition("blocks.")[2] for line in lines if "all_gather" in line]
    assert gathered == ["1", "1.inner", "0", "0.inner"]
    num_prefetches = (
        memory_stats(differential.model)["num_prefetches"] - before["num_prefetches"]
    )
    at_begin = prefetch == "BACKWARD_PRE" and TEST_DEVICE != "cpu"
    assert num_prefetches == (0 if prefetch is None else 3 if at_begin else 1)
    differential.check()


@pytest.mark.trap(9)
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=(2, 3))
def test_prefetch_for_a_unit_that_backward_does_not_reach(
    strategy: str, prefetch: str
) -> None:
    """Backward ends in the middle: what is in flight is dropped and not used again."""
    differential = Differential.of_units(
        _chain, {Block}, strategy=strategy, backward_prefetch=BackwardPrefetch[prefetch]
    )
    both: tuple[Any, ...] = (differential.reference, differential.model)
    differential.train(2)
    for _ in range(2):
        differential.zero_grad()
        handles = [
            model.blocks[1].register_forward_hook(lambda m, i, out: out.detach())
            for model in both
        ]
        differential.forward_backward()
        for handle in handles:
            handle.remove()
        assert_idle(differential.model)
        differential.checked_step()
        differential.train(1)


@pytest.mark.trap(5)
@every_strategy
@distributed(world_size=(2, 3, 4))
@with_model("called_twice")
def test_forward_of_the_next_batch_before_this_backward(
    differential: Differential,
) -> None:
    """One forward ahead, as in a pipeline; each backward ends for itself."""
    ahead = differential.forward()
    for _ in range(4):
        mean, mine = ahead
        ahead = differential.forward()
        mean.backward()
        mine.backward()
        assert unit_states(differential.model) <= {"SHARDED", "UNSHARDED"}
        differential.check()
    for loss in ahead:
        loss.backward()
    assert_idle(differential.model)
    differential.checked_step()
    differential.train(1)


@pytest.mark.trap(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3))
def test_frozen_units_are_resharded_inside_backward(use_orig_params: bool) -> None:
    """Memory does not grow with their number: not only the end gives it back."""
    arena_nbytes = []
    for num_blocks in (6, 9):

        def build(num_blocks: int = num_blocks) -> nn.Module:
            model = _chain(num_blocks=num_blocks)
            for block in model.blocks[1:]:
                block.requires_grad_(False)
            return model

        differential = Differential.of_units(
            build, {Block}, use_orig_params=use_orig_params
        )
        differential.train(3)
        arena_nbytes.append(memory_stats(differential.model)["peak_nbytes"])
    assert arena_nbytes[0] == arena_nbytes[1]
