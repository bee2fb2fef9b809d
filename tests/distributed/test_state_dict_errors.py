"""State dicts that do not fit: what is said, and that nothing is changed."""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import first_ranks
from helpers.impl import fsdp
from helpers.models import MLP, Block
from helpers.reference import assert_same_tensors, full_state_dict
from helpers.state_dicts import FULL, LOCAL, SHARDED, load, save

pytestmark = pytest.mark.bookkeeping


_wrap = functools.partial(fsdp, units={Block})


@contextlib.contextmanager
def _refused(model: nn.Module, *patterns: str) -> Iterator[None]:
    """Expect an error with all patterns, and that ``model`` stays as it is."""
    before = full_state_dict(model)
    with pytest.raises(RuntimeError) as caught:
        yield
    for pattern in patterns:
        assert pattern in str(caught.value), f"{pattern!r} not in {caught.value}"
    assert_same_tensors("model", full_state_dict(model), before, 0.0)
    model(torch.randn(4, 6)).sum().backward()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_other_kinds(use_orig_params: bool) -> None:
    """Every kind given to every other: key, what it is, what to do."""
    source = _wrap(MLP(), use_orig_params=use_orig_params)
    model = _wrap(MLP(), use_orig_params=use_orig_params)
    state = {kind: save(source, kind) for kind in (FULL, SHARDED, LOCAL)}
    with _refused(model, "inp.weight is a Tensor of shape (6, 6)", "FULL_STATE_DICT"):
        load(model, SHARDED, state[FULL])
    with _refused(model, "inp.weight is a ShardedTensor", "type SHARDED_STATE_DICT"):
        load(model, FULL, state[SHARDED])
    with _refused(
        model, "'_flat_param' belongs to a LOCAL state dict", "LOCAL_STATE_DICT"
    ):
        load(model, FULL, state[LOCAL])
    with _refused(model, "'_flat_param' belongs to a LOCAL state dict"):
        load(model, SHARDED, state[LOCAL], strict=False)
    with _refused(
        model, "the state dict has 'inp.weight'", "FULL_STATE_DICT or SHARDED"
    ):
        load(model, LOCAL, state[FULL])
    with _refused(model, "the state dict has 'inp.weight'"):
        load(model, LOCAL, state[SHARDED])


@pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL])
@distributed(world_size=2)
def test_other_shapes(kind: Any) -> None:
    """One parameter of another shape: nothing is loaded, strict or not."""
    other = MLP()
    other.out = nn.Linear(6, 4)
    wrapped = _wrap(other)
    state = save(wrapped, kind)
    model = _wrap(MLP())
    # On the CPU 70 and 63; an accelerator aligns each parameter in them.
    flat_shapes = [
        str(tuple(each["_flat_param"].metadata().size))
        for each in (save(wrapped, LOCAL), save(model, LOCAL))
    ]
    assert flat_shapes[0] != flat_shapes[1]
    patterns = {
        FULL: ("out.weight", "[4, 6]", "[3, 6]", "out.bias", "[4]", "[3]"),
        SHARDED: ("out.weight", "[4, 6]", "[3, 6]", "out.bias", "[4]", "[3]"),
        LOCAL: ("_flat_param", *flat_shapes, "use_orig_params"),
    }
    for strict in (True, False):
        with _refused(model, "size mismatch", *patterns[kind]):
            load(model, kind, state, strict=strict)


@distributed(world_size=3)
def test_other_world_sizes() -> None:
    """Saved on 3 ranks, loaded on 2: refused, with the way to do it."""
    torch.manual_seed(0)
    source = _wrap(MLP())
    state = {kind: save(source, kind) for kind in (SHARDED, LOCAL)}
    with first_ranks(2) as group:
        if group is None:
            return
        model = _wrap(MLP(), process_group=group)
        with _refused(model, "inp.weight", "2 ranks", "torch.distributed.checkpoint"):
            load(model, SHARDED, state[SHARDED])
        with _refused(model, "_flat_param", "SHARDED_STATE_DICT"):
            load(model, LOCAL, state[LOCAL])
        del model


@distributed(world_size=2)
def test_other_use_orig_params() -> None:
    """LOCAL layouts differ where parameters are aligned with one of the two only."""
    module = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 5))
    state = save(fsdp(copy.deepcopy(module), use_orig_params=True), LOCAL)
    expected = module.state_dict()
    model = fsdp(copy.deepcopy(module), use_orig_params=False)
    if TEST_DEVICE != "cpu":  # accelerators align with both
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        load(model, LOCAL, state)
        assert_same_tensors("loaded", full_state_dict(model), expected, 0.0)
        return
    with _refused(model, "_flat_param", "use_orig_params"):
        load(model, LOCAL, state)


@pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_missing_and_unexpected(use_orig_params: bool, kind: Any) -> None:
    """Clean names; with strict=False they are returned and the rest is loaded."""
    torch.manual_seed(0)
    source = _wrap(MLP(), use_orig_params=use_orig_params)
    model = _wrap(MLP(), use_orig_params=use_orig_params)
    state = save(source, kind)
    gone = "blocks.1._flat_param" if kind is LOCAL else "blocks.1.fc1.weight"
    other = {
        name: value
        for name, value in state.items()
        if name != gone and (kind is not LOCAL or not name.startswith("blocks.1."))
    }
    other["blocks.0.other"] = torch.zeros(2)
    with pytest.raises(RuntimeError) as caught:
        load(model, kind, other)
    assert f'Missing key(s) in state_dict: "{gone}"' in str(caught.value)
    assert 'Unexpected key(s) in state_dict: "blocks.0.other"' in str(caught.value)
    result = load(model, kind, other, strict=False)
    assert result.missing_keys == [gone]
    assert result.unexpected_keys == ["blocks.0.other"]
    loaded, expected = full_state_dict(model), full_state_dict(source)
    if kind is not LOCAL:
        assert not torch.equal(loaded[gone], expected.pop(gone))
        del loaded[gone]
    else:
        loaded, expected = (
            {name: t for name, t in each.items() if not name.startswith("blocks.1.")}
            for each in (loaded, expected)
        )
    assert_same_tensors("rest", loaded, expected, 0.0)


@distributed(world_size=2)
def test_a_rank_with_other_values(rank: int) -> None:
    """A problem on one rank is one on all: no rank loads, none waits."""
    state = save(_wrap(MLP()), SHARDED)
    model = _wrap(MLP())
    if rank == 1:
        state["inp.weight"] = torch.zeros(6, 6)
    with _refused(model, "inp.weight is a Tensor" if rank == 1 else "another rank"):
        load(model, SHARDED, state)


@distributed(world_size=2)
def test_beside_a_module_with_loading_of_its_own() -> None:
    """Units of plain modules are checked there, too, each before it is loaded."""
    module = MLP()
    module.out.register_load_state_dict_post_hook(lambda *_: None)
    model = _wrap(module)
    state = full_state_dict(model)
    name = "blocks.0.fc1.weight"
    with _refused(model, f"size mismatch for {name}", "[1, 2]", "[10, 6]"):
        load(model, FULL, {**state, name: torch.zeros(1, 2)})
    with _refused(model, "size mismatch for out.bias", "[4]", "[3]"):
        load(model, FULL, {**state, "out.bias": torch.zeros(4)})


@distributed(world_size=2)
def test_wrong_values_and_moments() -> None:
    """No tensors; inside forward; assign."""
    model = _wrap(MLP())
    state: dict[str, Any] = full_state_dict(model)
    with _refused(model, '"out.bias": expected torch.Tensor', "NoneType"):
        load(model, FULL, {**state, "out.bias": None})
    with pytest.raises(ValueError, match="assign=True"):
        load(model, FULL, state, assign=True)
    problems = []

    def inside(*_: Any) -> None:
        for call in (lambda: save(model, LOCAL), lambda: load(model, FULL, state)):
            with pytest.raises(RuntimeError) as caught:
                call()
            problems.append(str(caught.value))

    handle = model.module.out.register_forward_pre_hook(inside)
    model(torch.randn(4, 6))
    handle.remove()
    for method, problem in zip(
        ("state_dict", "load_state_dict"), problems, strict=True
    ):
        assert f"{method}() was called inside forward" in problem
        assert "between steps" in problem
    with _refused(model, "out.bias"):
        load(model, FULL, {**state, "out.bias": torch.zeros(2)})
