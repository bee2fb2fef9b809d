"""Prefetch and rate-limiter settings change the schedule, never the result."""

from typing import Any

import pytest
from torch import nn

from helpers.distributed import distributed
from helpers.impl import BackwardPrefetch
from helpers.models import MLP, Block
from helpers.reference import Differential


def _differential(build: Any, use_orig_params: bool, **kwargs: Any) -> Differential:
    return Differential.of_units(
        build, {Block}, use_orig_params=use_orig_params, **kwargs
    )


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("limit_all_gathers", [True, False])
@pytest.mark.parametrize("forward_prefetch", [True, False])
@pytest.mark.parametrize("backward_prefetch", ["BACKWARD_PRE", "BACKWARD_POST", None])
@distributed(world_size=(2, 3))
def test_settings(
    backward_prefetch: str | None,
    forward_prefetch: bool,
    limit_all_gathers: bool,
    use_orig_params: bool,
) -> None:
    """Five units, three steps, an evaluation between them."""
    differential = _differential(
        lambda: MLP(num_blocks=4),
        use_orig_params,
        backward_prefetch=backward_prefetch and BackwardPrefetch[backward_prefetch],
        forward_prefetch=forward_prefetch,
        limit_all_gathers=limit_all_gathers,
    )
    differential.train(2)
    differential.evaluate()
    differential.train(1)


class _Skips(nn.Module):
    """Runs other units in other orders from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(6, 2)
        self.num_calls = 0

    def forward(self, x: Any) -> Any:
        orders = [(0, 1, 2, 3), (3, 1, 0), (2, 0, 1, 3), (1,), (0, 1, 2, 3)]
        for index in orders[self.num_calls % len(orders)]:
            x = self.blocks[index](x)
        return self.out(x)


@pytest.mark.trap(9)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("forward_prefetch", [True, False])
@pytest.mark.parametrize("backward_prefetch", ["BACKWARD_PRE", "BACKWARD_POST"])
@distributed(world_size=2)
def test_order_changes_between_steps(
    backward_prefetch: str, forward_prefetch: bool, use_orig_params: bool
) -> None:
    """A unit that was prefetched but not used must not keep old weights."""
    differential = _differential(
        _Skips,
        use_orig_params,
        backward_prefetch=BackwardPrefetch[backward_prefetch],
        forward_prefetch=forward_prefetch,
    )
    sharded = next(m for m in differential.model.modules() if isinstance(m, _Skips))
    reference = differential.reference
    assert isinstance(reference, _Skips)
    for step in range(6):
        reference.num_calls = sharded.num_calls = step
        differential.train(1)
