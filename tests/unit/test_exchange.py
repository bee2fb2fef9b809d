"""Exchanges as Python sees them; tests/c/test_exchange.c has the plans themselves."""

from typing import Any

import pytest
import torch

from fsdp_c._native import prepare_messages

HELD = [(0, 3), (3, 5)]
WHOLE_ON_0 = [(0, 5), (0, 0)]


def _prepare(rank: int, source: Any, target: Any, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "items": [(4, HELD, WHOLE_ON_0)],
        "sources": [source],
        "targets": [target],
        "direct_nbytes": 100,
        **changes,
    }
    return prepare_messages(rank, **given)


def test_views_of_both_ranks() -> None:
    """What rank 1 sends is what rank 0 gets; rank 0 copies its own."""
    sources = [torch.arange(3.0), torch.arange(3.0, 5.0)]
    result, nothing = torch.zeros(5), torch.empty(0)
    outgoing, incoming, copies, unpacking = _prepare(0, sources[0], result)
    (peer, place), (copy,) = incoming[0], copies
    assert (outgoing, unpacking, peer) == ([], [], 1)
    copy[1].copy_(copy[0])
    ((peer, message),), incoming, copies, unpacking = _prepare(1, sources[1], nothing)
    assert (incoming, copies, unpacking, peer) == ([], [], [], 0)
    place.copy_(message)
    assert result.tolist() == [0, 1, 2, 3, 4]
    assert message.dtype == place.dtype == torch.uint8


def test_packed_together() -> None:
    """Pieces of several dtypes are one message, unpacked from where it arrives."""
    items = [(4, HELD, WHOLE_ON_0), (2, HELD, WHOLE_ON_0)]
    first, second = torch.tensor([3.0, 4.0]), torch.tensor([5, 6], dtype=torch.int16)
    empty = [torch.empty(0), torch.empty(0, dtype=torch.int16)]
    ((_, message),), *_ = prepare_messages(
        1, items, [first, second], empty, direct_nbytes=100
    )
    assert message.numel() == 12
    results = [torch.zeros(5), torch.zeros(5, dtype=torch.int16)]
    own = [torch.zeros(3), torch.zeros(3, dtype=torch.int16)]
    _, ((_, arrived),), _, unpacking = prepare_messages(
        0, items, own, results, direct_nbytes=100
    )
    arrived.copy_(message)
    for source, target in unpacking:
        target.copy_(source)
    assert results[0].tolist() == [0, 0, 0, 3, 4]
    assert results[1].tolist() == [0, 0, 0, 5, 6]


def test_a_source_that_is_not_contiguous() -> None:
    """Its elements count in their order, not its memory."""
    source = torch.tensor([[3.0, 9.0], [4.0, 9.0]])[:, 0]
    ((_, message),), *_ = _prepare(1, source, torch.empty(0))
    assert message.view(torch.float32).tolist() == [3, 4]


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
        (0, {"items": [(4, HELD, [(0, 5)])]}, ValueError, "by 1 ranks"),
        (0, {"items": [(4, [(3, 0), (3, 5)], HELD)]}, ValueError, r"\[3, 0\)"),
        (0, {"items": [(4, [3, 5], HELD)]}, TypeError, "held"),
    ],
)
def test_refused(
    rank: int, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Nothing is planned, and the message says what is wrong."""
    with pytest.raises(error, match=message):
        _prepare(rank, torch.ones(3), torch.zeros(5), **changes)
