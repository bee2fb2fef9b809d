"""Ranks that run their units in different orders: who is told what, and when.

Without the debug mode: test_failures.py.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_c import reset
from helpers.distributed import distributed, every_strategy
from helpers.groups import hybrid_groups
from helpers.models import BATCH, DIM, Block
from helpers.orders import debugging
from helpers.reference import Differential, objects_of_all_ranks
from helpers.rows import in_either_api


class Ordered(nn.Module):
    """Runs its blocks in the order that it is told."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.order = list(range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def _make(strategy: str, use_orig_params: bool, **kwargs: Any) -> Differential:
    return Differential.of_units(
        Ordered, {Block}, strategy=strategy, use_orig_params=use_orig_params, **kwargs
    )


def _failure(model: nn.Module, *, backward: bool = False) -> str:
    """Return the message of the error in a step, without its frames."""
    try:
        out = model(torch.ones(BATCH, DIM))
        if backward:
            out.sum().backward()
    except RuntimeError as error:
        return str(error)
    msg = "no error was raised"
    raise AssertionError(msg)


@pytest.mark.bookkeeping
@pytest.mark.parametrize("level", ["INFO", "DETAIL"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=(2, 3, 4))
def test_different_orders(
    rank: int, world_size: int, strategy: str, level: str
) -> None:
    """In the first iteration all ranks raise an error that names both units."""
    with debugging(level):
        differential = _make(strategy, use_orig_params=True)
        if rank == world_size - 1:
            differential.model.module.order = [0, 2, 1, 3]
        message = _failure(differential.model)
        assert message.startswith("Forward order differs across ranks: the ranks")
        assert "different orders" in message
        assert "blocks.1" in message
        assert "blocks.2" in message
        assert f"rank {world_size - 1}: " in message
        messages = objects_of_all_ranks(message)
        assert len(set(messages)) == 1, messages
        del differential


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3))
def test_training_goes_on_after_reset(rank: int, use_orig_params: bool) -> None:
    """The exchanged messages leave the ranks in step."""
    with debugging("INFO"):
        differential = _make("FULL_SHARD", use_orig_params)
        module = differential.model.module
        if rank == 0:
            module.order = [0, 3, 1]
        assert "different orders" in _failure(differential.model)
        module.order = [0, 1, 2, 3]
        reset(differential.model)
        differential.train(2)
        del differential, module


@distributed(world_size=2)
def test_rank_skips_a_unit(rank: int) -> None:
    """The first difference may be the end of forward on one rank."""
    with debugging("INFO"):
        differential = _make("FULL_SHARD", use_orig_params=True)
        if rank == 1:
            differential.model.module.order = [0, 1, 2]
        message = _failure(differential.model, backward=True)
        assert "different orders" in message
        assert "blocks.3" in message
        del differential


@pytest.mark.bookkeeping
@distributed(world_size=4)
def test_replicas(rank: int) -> None:
    """Shard groups compare for themselves: both differ here."""
    with hybrid_groups(2, 2) as groups, debugging("INFO"):
        differential = _make("HYBRID_SHARD", True, process_group=groups)
        if rank % 2 == 1:
            differential.model.module.order = [3, 2, 1, 0]
        message = _failure(differential.model)
        assert "blocks.0" in message
        assert "blocks.3" in message
        del differential


@pytest.mark.trap(9)
@every_strategy
@pytest.mark.parametrize("forward_prefetch", [True, False])
@distributed(world_size=(2, 3))
def test_equal_orders_pass(
    forward_prefetch: bool, strategy: str, use_orig_params: bool
) -> None:
    """Also where all ranks change the order: prefetches follow the new one."""
    with debugging("INFO"):
        differential = _make(
            strategy, use_orig_params, forward_prefetch=forward_prefetch
        )
        both: tuple[Any, ...] = (differential.reference, differential.model.module)
        for order in ([0, 1, 2, 3], [3, 1, 0], [3, 1, 0], [2, 2, 1], [0, 1, 2, 3]):
            for module in both:
                module.order = order
            differential.train(1)
        differential.evaluate()
        differential.accumulate(2, no_sync=True)
        del differential, both, module


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@pytest.mark.parametrize("where", ["all", "one"])
@distributed(world_size=2)
def test_a_new_order_is_told(rank: int, where: str, api: str) -> None:
    """A warning, once, in the first iteration of training that differs.

    Where one rank differs, it alone warns, and all go on.
    """
    with (
        debugging("DETAIL"),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        differential = in_either_api(api, Ordered, {Block})
        model = differential.model
        both: Any = (differential.reference, getattr(model, "module", model))
        differential.train(2)
        if where == "one":
            if rank == 1:
                both[1].order = [0, 2, 1, 3]
            model(torch.ones(BATCH, DIM, dtype=torch.float64)).sum().backward()
        else:
            for module in both:
                module.order = [3, 1, 0]
            differential.evaluate()
            assert not _of_orders(told)
            differential.train(2)
        found = _of_orders(told)
        assert len(found) == (1 if where == "all" or rank == 1 else 0), found
        if found:
            words = "Forward order differs from that of the first iteration on rank "
            assert found[0].startswith(f"{words}{rank}. Collectives are unchecked")
            name = "blocks.3" if where == "all" else "blocks.2"
            assert f"'{name}' runs where unit " in found[0]
        del differential, model, both


def _of_orders(told: list[warnings.WarningMessage]) -> list[str]:
    messages = [str(each.message) for each in told]
    return [each for each in messages if each.startswith("Forward order")]
