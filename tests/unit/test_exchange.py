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
CPU = torch.device("cpu")


def _move(source: Any, target: Any = None, **changes: Any) -> tuple[Any, ...]:
    given: dict[str, Any] = {
        "source": source,
        "dtype": torch.float32,
        "position": 0,
        "held": HELD,
        "needed": ON_0,
        "target": target,
        "shape": None,
        **changes,
    }
    return tuple(given.values())


def _prepare(rank: int, /, *moves: Any, **changes: Any) -> Any:
    given = {"rank": rank, "world_size": 2, "device": CPU, "direct_nbytes": 100}
    return prepare_exchange(moves=moves, **(given | changes))


def test_views_of_both_ranks() -> None:
    """What rank 1 sends is what rank 0 gets; rank 0 copies its own."""
    target = torch.zeros(5)
    results, outgoing, incoming, copies, unpacking = _prepare(
        0, _move(torch.arange(3.0), target)
    )
    assert results[0] is target
    ((peer, place),) = incoming
    assert peer == 1
    assert [(to, each.numel()) for to, each in outgoing] == [(1, 0)]
    copy_tensors(copies)
    copy_tensors(unpacking)
    assert target.tolist() == [0, 1, 2, 0, 0]
    results, outgoing, incoming, *_ = _prepare(1, _move(torch.arange(3.0, 5.0)))
    ((peer, message),) = outgoing
    assert peer == 0
    assert [each.shape for each in results] == [(0,)]
    assert [(to, each.numel()) for to, each in incoming] == [(0, 0)]
    place.copy_(message)
    assert target.tolist() == [0, 1, 2, 3, 4]
    assert message.dtype == place.dtype == torch.uint8


def test_packed_together() -> None:
    """Pieces of several dtypes are one message, unpacked from where it arrives."""
    first, second = torch.tensor([3.0, 4.0]), torch.tensor([5, 6], dtype=torch.int16)
    _, ((_, message),), *_ = _prepare(1, _move(first), _move(second, dtype=torch.int16))
    assert message.numel() == 12
    results, _, ((_, arrived),), copies, unpacking = _prepare(
        0,
        _move(torch.zeros(3)),
        _move(torch.ones(3, dtype=torch.int16), dtype=torch.int16),
    )
    arrived.copy_(message)
    copy_tensors(copies)
    copy_tensors(unpacking)
    assert results[0].tolist() == [0, 0, 0, 3, 4]
    assert results[1].tolist() == [1, 1, 1, 5, 6]


def test_a_source_that_is_not_contiguous() -> None:
    """Its elements count in their order, not its memory; its gradient does not."""
    source = torch.tensor([[3.0, 9.0], [4.0, 9.0]], requires_grad=True)[:, 0]
    _, ((_, message),), *_ = _prepare(1, _move(source))
    assert message.view(torch.float32).tolist() == [3, 4]


def test_results() -> None:
    """New ones have the shape where it is theirs, and are large ones side by side."""
    numels = [0, 1, 3, 1_000_000, 17, 20_000_000]
    whole = Placement.on_ranks(numels, 0, 1)
    changes = {"held": whole, "needed": whole}
    moves = [
        _move(torch.full((numel,), float(i)), None, position=i, **changes)
        for i, numel in enumerate(numels)
    ]
    moves[2] = (*moves[2][:-1], torch.Size([3, 1]))
    moves[3] = (*moves[3][:-1], (1000, 1001))
    results, _, _, copies, _ = _prepare(0, *moves, world_size=1)
    copy_tensors(copies)
    shapes = [(0,), (1,), (3, 1), (1_000_000,), (17,), (20_000_000,)]
    for index, (result, shape) in enumerate(zip(results, shapes, strict=True)):
        assert result.shape == shape
        assert result.is_contiguous()
        assert result.untyped_storage().nbytes() == result.nbytes
        assert result.data_ptr() % 64 == 0
        assert not result._is_view()
        assert (result == index).all()
    last = results.pop()
    expected = last.clone()
    results.clear()  # the memory of one does not go with another's
    del copies
    assert torch.equal(last, expected)
    last.resize_(30_000_000)
    assert torch.equal(last[:20_000_000], expected)
    assert prepare_exchange(0, 1, [], CPU, direct_nbytes=1)[:3] == ([], [], [])


@pytest.mark.parametrize(
    ("needed", "packed"), [(ON_0, 8), (Placement.on_ranks([5], 0, 2), 20)]
)
def test_size(needed: Placement, packed: int) -> None:
    """Small pieces for other ranks count, once."""
    move: Any = _move(None, needed=needed)
    assert exchange_size([move, move], direct_nbytes=100) == (40, 2 * packed)
    assert exchange_size([move], direct_nbytes=8) == (20, 0)
    assert exchange_size([], direct_nbytes=8) == (0, 0)


@pytest.mark.parametrize(
    ("move", "changes", "error", "message"),
    [
        (_move(None), {}, ValueError, "source of item 0 is None.* 12 bytes"),
        (_move(torch.ones(2)), {}, ValueError, "8 bytes, the exchange has 12"),
        (_move("x"), {}, ValueError, "source of item 0 is no tensor"),
        (
            _move(torch.ones(3), torch.ones(4)),
            {},
            ValueError,
            "target of item 0 has 16 bytes",
        ),
        (
            _move(torch.ones(3), torch.ones(5, device="meta")),
            {},
            ValueError,
            "target of item 0 is on the meta device",
        ),
        (_move(torch.ones(3)), {"rank": 2}, ValueError, "rank 2 of 2 ranks"),
        (_move(torch.ones(3)), {"device": "cpu"}, ValueError, "torch.device"),
        (_move(torch.ones(3)), {"world_size": 1}, ValueError, "on rank 1 of 1"),
        ((4, HELD), {}, TypeError, r"moves\[0\] must be a tuple"),
        (_move(None, needed=[(0, 5)]), {}, TypeError, "expected a Placement"),
        (_move(None, position="0"), {}, TypeError, "integer"),
        (_move(None, dtype="float32"), {}, ValueError, "dtype"),
        (_move(torch.ones(3), shape=5), {}, ValueError, "no tuple"),
        (_move(torch.ones(3), shape=("5",)), {}, TypeError, "integer"),
    ],
)
def test_refused(
    move: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Nothing is planned, and the message says what is wrong."""
    with pytest.raises(error, match=message):
        _prepare(0, move, **changes)


def test_copies_refused() -> None:
    """They are those of an exchange."""
    with pytest.raises(ValueError, match="copies of an exchange"):
        copy_tensors([(torch.ones(3), torch.ones(3))])  # type: ignore[arg-type]
