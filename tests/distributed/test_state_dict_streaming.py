"""State dicts one unit at a time: memory, hooks, a rank that does not call."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_c._state import exchange
from fsdp_c._state.model import save as saving
from helpers.allocations import counted
from helpers.distributed import TEST_DEVICE, distributed
from helpers.impl import FullStateDictConfig, fsdp
from helpers.reference import assert_same_tensors, full_state_dict
from helpers.state_dicts import FULL, LOCAL, SHARDED, load, save, whole_state

WIDTH = 128
UNIT_NBYTES = WIDTH * WIDTH * 4
SLACK_NBYTES = 16384
GROUP_TIMEOUT_S = 1.5


class _SubBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = _SubBlock()
        self.fc = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = _SubBlock()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fc(self.first(x)))


class _Deep(nn.Module):
    """Root, blocks and sub-blocks: units of equal size, three deep."""

    num_units = 7

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.fc = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.fc(x)


def _wrap(module: nn.Module, **kwargs: Any) -> Any:
    return fsdp(module, units={_Block, _SubBlock}, **kwargs)


@pytest.mark.trap(26)
@pytest.mark.parametrize("rank0_only", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3))
def test_full_takes_its_result(
    rank: int, use_orig_params: bool, rank0_only: bool
) -> None:
    """Beside the result at most one unit: small pieces are packed."""
    reference = _Deep()
    model = _wrap(copy.deepcopy(reference), use_orig_params=use_orig_params)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    save(model, FULL, config)  # makes the engine
    with pytest.MonkeyPatch.context() as patch, counted() as allocations:
        patch.setattr(exchange, "SHARED_NBYTES", 0)  # these units are small
        state = save(model, FULL, config)
    has_state = rank == 0 or not rank0_only
    result_nbytes = _Deep.num_units * UNIT_NBYTES if has_state else 0
    assert allocations.peak_nbytes <= result_nbytes + UNIT_NBYTES + SLACK_NBYTES
    assert allocations.left_nbytes <= result_nbytes + SLACK_NBYTES
    if has_state:
        assert_same_tensors("state", state, reference.state_dict(), 0.0)
    else:
        assert state == {}


@pytest.mark.parametrize("kind", [SHARDED, LOCAL])
@distributed(world_size=(2, 3))
def test_sharded_and_local_peaks(world_size: int, kind: Any) -> None:
    """The result is a part, and nothing is beside it."""
    model = _wrap(_Deep())
    save(model, kind)
    with counted() as allocations:
        state = save(model, kind)
    rows = -(-WIDTH // world_size)
    result_nbytes = _Deep.num_units * rows * WIDTH * 4
    assert allocations.peak_nbytes <= result_nbytes + SLACK_NBYTES
    del state


@pytest.mark.parametrize("kind", [FULL, LOCAL])
@distributed(world_size=(2, 3))
def test_loading_takes_no_memory(rank: int, kind: Any) -> None:
    """FULL and LOCAL: each rank copies its part, without communication."""
    model = _wrap(_Deep())
    state = save(model, kind)
    load(model, kind, state)
    if kind is LOCAL or rank == 0:  # rank 0 alone: it does not wait for the others
        with counted() as allocations:
            load(model, kind, state)
        assert allocations.peak_nbytes <= SLACK_NBYTES


@distributed(world_size=(2, 3))
def test_sharded_load_takes_parts(world_size: int) -> None:
    """One exchange a unit, which takes a rank's part of it and no more."""
    torch.manual_seed(0)
    model = _wrap(_Deep())
    state = save(_wrap(_Deep()), SHARDED)
    load(model, SHARDED, state)  # meets the other ranks
    with counted() as allocations:
        load(model, SHARDED, state)
    part_nbytes = -(-WIDTH // world_size) * WIDTH * 4 + 16 * world_size
    packed_nbytes = 2 * part_nbytes  # all of it here: what is sent, what arrives
    assert allocations.peak_nbytes <= part_nbytes + packed_nbytes + SLACK_NBYTES
    expected = whole_state(state)
    assert_same_tensors("loaded", full_state_dict(model), expected, 0.0)


class _Watched(nn.Module):
    """Keeps what its hooks saw: own shape, prefix, keys before."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.register_buffer("seen", torch.zeros(2))
        self.log = log
        self.register_state_dict_pre_hook(_Watched._before)
        self.register_state_dict_post_hook(_Watched._after)

    def __deepcopy__(self, memo: Any) -> "_Watched":
        other = _Watched(self.log)
        with torch.no_grad():
            other.weight.copy_(self.weight)
        return other

    def _before(self, prefix: str, keep_vars: bool) -> None:
        self.log.append(("before", prefix, tuple(self.weight.shape), keep_vars))

    def _after(self, state: Any, prefix: str, meta: Any) -> None:
        key = f"{prefix}weight"
        self.log.append(("after", prefix, tuple(state[key].shape), dict(meta)))
        state[f"{prefix}twice"] = state[key] * 2

    def _save_to_state_dict(
        self, destination: Any, prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}alias"] = self.weight.detach().view(4, 3)


class _Outer(nn.Module):
    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.own = _Watched(log)
        self.nested = nn.Sequential(_Watched(log))


@distributed(world_size=2)
def test_hooks_see_what_they_see_unwrapped() -> None:
    """Whole parameters, right prefixes; what hooks add is in the right place."""
    log: list[Any] = []
    reference = _Outer(log)
    module = copy.deepcopy(reference)
    expected = reference.state_dict(prefix="p.")
    expected_log, log[:] = list(log), []
    module.nested[0] = fsdp(module.nested[0], use_orig_params=True)
    model = fsdp(module, use_orig_params=True)
    state = model.state_dict(prefix="p.")
    assert list(state) == list(expected)
    assert sorted(log, key=str) == sorted(expected_log, key=str)
    assert_same_tensors("state", state, expected, 0.0)
    for name, meta in expected._metadata.items():
        assert state._metadata[name] == meta, name
    del model, module
    log.clear()


class _Custom(nn.Module):
    """Loading of its own: old names, a check of its shape, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))
        self.version = torch.tensor(1.0)
        self.loaded_sum = 0.0

    def get_extra_state(self) -> Tensor:
        return self.version

    def set_extra_state(self, state: Tensor) -> None:
        self.version = state
        self.loaded_sum = float(self.weight.sum())

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        old = state.pop(f"{prefix}old_weight", None)
        if old is not None:
            state[f"{prefix}weight"] = old
        assert self.weight.shape == (4, 3)
        super()._load_from_state_dict(state, prefix, *args)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_modules_with_loading_of_their_own(use_orig_params: bool) -> None:
    """They see whole parameters; the other units do not need them."""
    module = nn.Sequential(_Custom(), nn.Linear(3, 3))
    model = fsdp(
        copy.deepcopy(module), units={_Custom}, use_orig_params=use_orig_params
    )
    value = torch.arange(12.0).view(4, 3)
    state = {**module.state_dict(), "0.weight": value, "0._extra_state": torch.ones(2)}
    load(model, FULL, state)
    assert model.module[0].loaded_sum == 66.0
    assert_same_tensors("whole", full_state_dict(model), state, 0.0)
    renamed = dict(state)
    renamed["0.old_weight"] = renamed.pop("0.weight") + 1
    load(model, FULL, renamed)
    assert torch.equal(full_state_dict(model)["0.weight"], value + 1)
    sharded = save(model, SHARDED)
    load(model, FULL, state)
    load(model, SHARDED, sharded)
    assert model.module[0].loaded_sum == 78.0
    assert torch.equal(whole_state(save(model, SHARDED))["0.weight"], value + 1)


@distributed(world_size=2)
def test_shared_with_a_module_outside() -> None:
    """A nested unit alone does not have a parameter that an outer one shards."""
    module = nn.Sequential(_SubBlock(), _SubBlock())
    module[1].fc.weight = module[0].fc.weight
    model = fsdp(module, units={_SubBlock}, use_orig_params=True)
    assert len(full_state_dict(model)) == 2
    for kind in (FULL, SHARDED, LOCAL):
        with pytest.raises(RuntimeError, match=r"'fc\.weight'.*shared with modules"):
            save(model[0], kind)
    with pytest.raises(RuntimeError, match=r"'fc\.weight'.*shared with modules"):
        load(model[0], FULL, {})


@contextmanager
def _impatient_group() -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    assert group is not None
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


@pytest.mark.bookkeeping
@pytest.mark.parametrize(
    "has_met", [True, pytest.param(False, marks=pytest.mark.only_full)]
)
@distributed(world_size=3)
def test_a_rank_that_does_not_call(rank: int, has_met: bool) -> None:
    """The others name the rank, and the call, after the group's timeout.

    Ranks whose group has carried nothing yet wait in their first meeting: no call.
    """
    with _impatient_group() as group:
        model = _wrap(_Deep(), process_group=group)
        if has_met:
            save(model, FULL, FullStateDictConfig(rank0_only=True))
        if rank != 0:  # the usual mistake, the other way round
            with pytest.raises(RuntimeError) as caught:
                save(model, FULL, FullStateDictConfig(rank0_only=True))
            message = str(caught.value)
            what = "state_dict() of unit" if has_met else "meeting of the ranks"
            assert what in message
            if TEST_DEVICE == "cpu" or not has_met:
                assert "rank 0: no answer" in message
            else:  # NCCL's watchdog says it
                assert f"rank {rank} of 3" in message
            assert not saving._kept
        dist.barrier()
        del model
