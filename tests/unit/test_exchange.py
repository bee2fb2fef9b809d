"""Exchanges as Python sees them; tests/c/test_exchange.c has the plans themselves."""

from typing import Any

import pytest
import torch

from fsdp_c._native import (
    Layout,
    Placement,
    copy_tensors,
    exchange_size,
    prepare_exchange,
)

# Five elements: [0, 3) on rank 0 and [3, 5) on rank 1.
LAYOUT = Layout([(5, torch.float32, True)], 2, align_params=False, align_shards=False)
HELD = Placement.flat(LAYOUT, 0)
ON_0 = Placement.on_ranks([5], 0, 1)
ITEM = (4, 0, HELD, ON_0)
EMPTY = torch.empty(0)


def _prepare(rank: int, source: Any, target: Any, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "world_size": 2,
        "items": [ITEM],
        "sources": [source],
        "targets": [target],
        "direct_nbytes": 100,
        **changes,
    }
    return prepare_exchange(rank, **given)


def test_views_of_both_ranks() -> None:
    """What rank 1 sends is what rank 0 gets; rank 0 copies its own."""
    result = torch.zeros(5)
    outgoing, incoming, copies, unpacking = _prepare(0, torch.arange(3.0), result)
    ((peer, place),) = incoming
    assert (unpacking, peer) == ([], 1)
    assert [(to, each.numel()) for to, each in outgoing] == [(1, 0)]
    copy_tensors(copies)
    outgoing, incoming, copies, unpacking = _prepare(1, torch.arange(3.0, 5.0), EMPTY)
    ((peer, message),) = outgoing
    assert (copies, unpacking, peer) == ([], [], 0)
    assert [(to, each.numel()) for to, each in incoming] == [(0, 0)]
    copy_tensors([(message, place)])
    assert result.tolist() == [0, 1, 2, 3, 4]
    assert message.dtype == place.dtype == torch.uint8


def test_packed_together() -> None:
    """Pieces of several dtypes are one message, unpacked from where it arrives."""
    items = [ITEM, (2, 0, HELD, ON_0)]
    first, second = torch.tensor([3.0, 4.0]), torch.tensor([5, 6], dtype=torch.int16)
    empty = [EMPTY, torch.empty(0, dtype=torch.int16)]
    ((_, message),), *_ = prepare_exchange(
        1, 2, items, [first, second], empty, direct_nbytes=100
    )
    assert message.numel() == 12
    results = [torch.zeros(5), torch.zeros(5, dtype=torch.int16)]
    own = [torch.zeros(3), torch.zeros(3, dtype=torch.int16)]
    _, ((_, arrived),), _, unpacking = prepare_exchange(
        0, 2, items, own, results, direct_nbytes=100
    )
    copy_tensors([(message, arrived)])
    copy_tensors(unpacking)
    assert results[0].tolist() == [0, 0, 0, 3, 4]
    assert results[1].tolist() == [0, 0, 0, 5, 6]


def test_a_source_that_is_not_contiguous() -> None:
    """Its elements count in their order, not its memory."""
    source = torch.tensor([[3.0, 9.0], [4.0, 9.0]])[:, 0]
    ((_, message),), *_ = _prepare(1, source, EMPTY)
    assert message.view(torch.float32).tolist() == [3, 4]


@pytest.mark.parametrize(
    ("needed", "packed"), [(ON_0, 8), (Placement.on_ranks([5], 0, 2), 20)]
)
def test_size(needed: Placement, packed: int) -> None:
    """Small pieces for other ranks count, once."""
    item = (4, 0, HELD, needed)
    assert exchange_size([item, item], direct_nbytes=100) == (40, 2 * packed)
    assert exchange_size([item], direct_nbytes=8) == (20, 0)
    assert exchange_size([], direct_nbytes=8) == (0, 0)


@pytest.mark.parametrize(
    ("rank", "changes", "error", "message"),
    [
        (0, {"sources": []}, ValueError, "0 sources and 1 targets"),
        (0, {"sources": [None]}, ValueError, "source of item 0 is None.* 12 bytes"),
        (0, {"sources": [torch.ones(2)]}, ValueError, "8 bytes, the exchange has 12"),
        (0, {"sources": ["x"]}, ValueError, "source of item 0 is no tensor"),
        (0, {"targets": [torch.ones(4)]}, ValueError, "target of item 0 has 16 bytes"),
        (2, {}, ValueError, "rank 2 of 2 ranks"),
        (0, {"items": [(4, HELD)]}, TypeError, r"items\[0\] must be a tuple"),
        (0, {"items": [(4, 0, HELD, [(0, 5)])]}, TypeError, "expected a Placement"),
        (0, {"items": [("4", 0, HELD, HELD)]}, TypeError, "integer"),
        (0, {"world_size": 1}, ValueError, "lies on rank 1 of 1"),
    ],
)
def test_refused(
    rank: int, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Nothing is planned, and the message says what is wrong."""
    with pytest.raises(error, match=message):
        _prepare(rank, torch.ones(3), torch.zeros(5), **changes)


def test_copies_refused() -> None:
    """Sizes must agree, and both must be tensors with memory in a row."""
    with pytest.raises(ValueError, match="target of a copy has 8 bytes"):
        copy_tensors([(torch.ones(3), torch.ones(2))])
    with pytest.raises(ValueError, match="no tensor"):
        copy_tensors([(torch.ones(3), "text")])
    with pytest.raises(TypeError, match="tuple"):
        copy_tensors([torch.ones(3)])
