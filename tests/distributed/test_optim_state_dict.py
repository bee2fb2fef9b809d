"""Optimizer state dicts, compared with the unsharded optimizer's."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_c._state import exchange
from helpers.distributed import STRATEGIES, TEST_DEVICE, distributed
from helpers.groups import hybrid_groups
from helpers.impl import FSDP, ShardingStrategy, fsdp
from helpers.models import CASES, Block, WithEmpty
from helpers.optim_states import (
    OPTIMIZERS,
    assert_own_memory,
    assert_same_states,
    by_name,
    full,
    in_form,
    train,
    trained,
    wrap,
)
from helpers.reference import Differential
from helpers.seeds import generator

# Of those that step a slice of a parameter as they step the whole.
ELEMENTWISE = [name for name in OPTIMIZERS if name not in ("adafactor", "counting")]


def _differential(model: str, optimizer: str, **kwargs: Any) -> Differential:
    return Differential.of_case(
        CASES[model],
        lambda module: wrap(model, module=module, **kwargs),
        use_orig_params=kwargs.get("use_orig_params", False),
        optimizer=OPTIMIZERS[optimizer],
    )


def _train(each: Differential, num_steps: int) -> None:
    for _ in range(num_steps):
        each.zero_grad()
        each.forward_backward()
        each.step()


@pytest.mark.trap(25)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("optimizer", ELEMENTWISE)
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=(2, 3))
def test_full_equals_the_unsharded_optimizer(
    optimizer: str, strategy: str, use_orig_params: bool
) -> None:
    """Before the first step (Adagrad has state then) and later, by name."""
    each = _differential(
        "uneven", optimizer, strategy=strategy, use_orig_params=use_orig_params
    )
    for num_steps in (0, 2):
        _train(each, num_steps)
        found = FSDP.optim_state_dict(each.model, each.optimizer)
        expected = by_name(each.reference, each.reference_optimizer)
        assert_same_states(found["state"], expected, 1e-4)
        assert_own_memory(found["state"])
        (group,) = found["param_groups"]
        names = [name for name, _ in each.reference.named_parameters()]
        assert sorted(group["params"]) == sorted(names)
        (reference,) = each.reference_optimizer.state_dict()["param_groups"]
        assert {**group, "params": 0} == {**reference, "params": 0}


@pytest.mark.trap(25)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    "model", ["scalar", "tied", "frozen", "frozen_units", "mixed_dtype", "transformer"]
)
@distributed(world_size=3)
def test_full_of_other_models(model: str, nested: bool, use_orig_params: bool) -> None:
    each = _differential(model, "adam", nested=nested, use_orig_params=use_orig_params)
    _train(each, 2)
    found = full(each.model, each.optimizer)
    expected = by_name(each.reference, each.reference_optimizer)
    assert_same_states(found["state"], expected, 4e-2 if "mixed" in model else 1e-4)


@pytest.mark.trap(25)
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_parameters_never_stepped(use_orig_params: bool) -> None:
    """A unit that never ran has no state; one ran in part has zeros, as its grads."""
    each = _differential("unused", "adam", use_orig_params=use_orig_params)
    _train(each, 2)
    found = full(each.model, each.optimizer)["state"]
    expected = by_name(each.reference, each.reference_optimizer)
    assert expected.keys() <= found.keys()
    extra = {name: found.pop(name) for name in found.keys() - expected.keys()}
    assert_same_states(found, expected, 1e-4)
    for name, state in extra.items():
        assert state["step"] == 2, name
        assert not state["exp_avg"].any(), name


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3))
def test_an_empty_parameter(use_orig_params: bool) -> None:
    """Unsharded it has a gradient and a state, so strict loads need one of it."""

    def trained() -> Differential:
        each = Differential.of_units(
            WithEmpty,
            {Block},
            use_orig_params=use_orig_params,
            optimizer=OPTIMIZERS["adam"],
        )
        _train(each, 2)
        return each

    each, other = trained(), trained()
    found = full(each.model, each.optimizer)
    expected = by_name(each.reference, each.reference_optimizer)
    assert_same_states(found["state"], expected, 1e-4)
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(each.model, each.optimizer, options=options)
    for model, optim in (
        (other.reference, other.reference_optimizer),
        (other.model, other.optimizer),
    ):
        set_optimizer_state_dict(model, optim, copy.deepcopy(state), options=options)
    assert_same_states(full(other.model, other.optimizer)["state"], found["state"])
    other.zero_grad()
    other.forward_backward()
    other.step()
    other.check()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=4)
def test_hybrid_groups(rank: int, use_orig_params: bool) -> None:
    """Every replica saves for itself; rank0_only, and loading from rank 0."""
    with hybrid_groups(2, 2) as groups:
        each = _differential(
            "uneven",
            "adam",
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            process_group=groups,
            use_orig_params=use_orig_params,
        )
        _train(each, 2)
        found = full(each.model, each.optimizer)
        expected = by_name(each.reference, each.reference_optimizer)
        assert_same_states(found["state"], expected, 1e-4)
        for group in (None, dist.group.WORLD):
            first = _rank0(each.model, each.optimizer, group=group)
            assert (first == {}) == (rank != 0)
            if rank == 0:
                assert_same_states(first["state"], found["state"])
            local = copy.deepcopy(each.optimizer.state_dict())
            loaded = _load_rank0(each.model, each.optimizer, first, group=group)
            assert_same_states(loaded["state"], local["state"])
        del each, local, loaded


@pytest.mark.parametrize("has_replicas", ["root", "every other unit"])
@pytest.mark.parametrize("num_replicas", [2, 4])
@distributed(world_size=4)
def test_a_unit_over_all_replicas(
    rank: int, num_replicas: int, has_replicas: str
) -> None:
    """rank0_only where some units have replicas, and others have none."""
    with hybrid_groups(num_replicas, 4 // num_replicas) as groups:
        hybrid = {"strategy": "HYBRID_SHARD", "process_group": groups}
        module, number = CASES["mlp"].build(), 0
        for parent in list(module.modules()):
            for name, child in parent.named_children():
                if isinstance(child, Block):
                    of_unit = hybrid if has_replicas != "root" and number % 2 else {}
                    unit = fsdp(child, use_orig_params=True, **of_unit)
                    setattr(parent, name, unit)
                    number += 1
        assert number > 2
        of_root = hybrid if has_replicas == "root" else {}
        model = fsdp(module, use_orig_params=True, **of_root)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        model(*CASES["mlp"].inputs(generator("x"))).sum().backward()
        optimizer.step()
        expected = full(model, optimizer)
        state = _rank0(model, optimizer)
        assert (state == {}) == (rank != 0)
        if rank == 0:
            assert_same_states(state["state"], expected["state"])
        loaded = _load_rank0(model, optimizer, state)
        assert_same_states(loaded["state"], optimizer.state_dict()["state"])
        del model, optimizer, module


def _rank0(model: Any, optim: Any, **kwargs: Any) -> dict[str, Any]:
    with in_form(model, "rank0"):
        result: dict[str, Any] = FSDP.optim_state_dict(model, optim, **kwargs)
    return result


def _load_rank0(model: Any, optim: Any, state: Any, **kwargs: Any) -> dict[str, Any]:
    with in_form(model, "rank0"):
        result: dict[str, Any] = FSDP.optim_state_dict_to_load(
            model, optim, state, **kwargs
        )
    return result


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("use_dtensor", [False, True])
@distributed(world_size=(2, 3))
def test_sharded_holds_rows(
    rank: int, world_size: int, use_dtensor: bool, use_orig_params: bool
) -> None:
    """Each rank's rows of what FULL returns; offset, shape and placement."""
    mesh = init_device_mesh(TEST_DEVICE, (world_size,)) if use_dtensor else None
    model, optim = trained(
        "scalar", "adam", 2, device_mesh=mesh, use_orig_params=use_orig_params
    )
    whole = full(model, optim)["state"]
    with in_form(model, "sharded"):
        found = FSDP.optim_state_dict(model, optim)["state"]
    assert list(found) == list(whole)
    for name, state in whole.items():
        for key, value in state.items():
            part = found[name][key]
            if value.dim() == 0:
                assert torch.equal(part, value), (name, key)
                continue
            assert tuple(part.size()) == value.shape, (name, key)
            rows = list(value.chunk(world_size)) + [value[:0]] * world_size
            if use_dtensor:
                local = part.to_local()
                assert part.full_tensor().equal(value)
            else:
                shards = part.local_shards()
                local = shards[0].tensor if shards else value[:0]
                for shard in shards:
                    begin = sum(len(each) for each in rows[:rank])
                    assert shard.metadata.shard_offsets[0] == begin
            assert torch.equal(local, rows[rank]), (name, key)
    del model, part, mesh


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_local_holds_this_ranks_state(use_orig_params: bool) -> None:
    """As it is, by name, with memory of its own; FSDP1 has no such state dict."""
    model, optim = trained("uneven", "counting", 1, use_orig_params=use_orig_params)
    with in_form(model, "local"):
        found = FSDP.optim_state_dict(model, optim)
    names = [
        name.replace("_fsdp_wrapped_module.", "")
        for name, _ in model.named_parameters()
    ]
    expected = {names[key]: state for key, state in optim.state_dict()["state"].items()}
    assert_same_states(found["state"], expected)
    assert found["param_groups"][0]["params"] == names
    before = copy.deepcopy(found["state"])
    train(model, optim, "uneven", 1)
    assert_same_states(found["state"], before)


@pytest.mark.trap(26)
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3))
def test_rank0_only(rank: int, use_orig_params: bool) -> None:
    """Rank 0 has all, the others nothing; and the reverse on loading."""
    model, optim = trained("scalar", "counting", 2, use_orig_params=use_orig_params)
    whole = full(model, optim)
    found = _rank0(model, optim)
    if rank > 0:
        assert found == {}
    else:
        assert_same_states(found["state"], whole["state"])
        assert found["param_groups"] == whole["param_groups"]
    local = copy.deepcopy(optim.state_dict())
    for given in (found, None) if rank > 0 else (found, found):
        loaded = _load_rank0(model, optim, given)
        assert_same_states(loaded["state"], local["state"])
        assert loaded["param_groups"] == local["param_groups"]
        assert_own_memory(loaded["state"])


@distributed(world_size=2)
def test_dict_does_not_follow_training() -> None:
    """What was saved stays, and what was loaded is not the user's."""
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model, optim = trained(
            "uneven", "adam", 1, strategy=strategy, use_orig_params=True
        )
        found = full(model, optim)
        before = copy.deepcopy(found)
        train(model, optim, "uneven", 1)
        assert_same_states(found["state"], before["state"])
        FSDP.optim_state_dict_to_load(model, optim, found, load_directly=True)
        train(model, optim, "uneven", 1)
        assert_same_states(found["state"], before["state"])
        assert found["param_groups"] == before["param_groups"]


@pytest.mark.parametrize("form", ["full", "rank0", "sharded"])
@distributed(world_size=(2, 3))
def test_few_exchanges(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One agreement, then units in batches: whatever they are, both ways.

    With nothing packed all units go at once. With all of it packed (small pieces) a
    batch is at most as large as the largest unit: some units still go together, unless
    each rank needs all of each unit.
    """
    model, optim = trained("transformer", "adam", 1, use_orig_params=True)
    local = copy.deepcopy(optim.state_dict()["state"])
    num_units = len(FSDP.fsdp_modules(model))
    is_free = form == "full"
    agree = mock.Mock(wraps=dist.all_gather_object)
    prepare = mock.Mock(wraps=exchange.prepare_exchange)
    monkeypatch.setattr(dist, "all_gather_object", agree)
    monkeypatch.setattr(exchange, "prepare_exchange", prepare)
    for nbytes in (exchange.DIRECT_NBYTES, 1):
        monkeypatch.setattr(exchange, "DIRECT_NBYTES", nbytes)
        agree.reset_mock()
        prepare.reset_mock()
        with in_form(model, form):
            found = FSDP.optim_state_dict(model, optim)
            assert agree.call_count == 1
            num_saves = prepare.call_count
            loaded = FSDP.optim_state_dict_to_load(model, optim, found)
            num_loads = prepare.call_count - num_saves
        assert_same_states(loaded["state"], local)
        if nbytes == 1 and TEST_DEVICE == "cpu":
            assert num_saves == 1
            assert num_loads == (0 if is_free else 1)
        else:  # on a device results count, too: a batch may be one unit
            goes_together = TEST_DEVICE == "cpu" and not is_free
            most = num_units - 1 if goes_together else num_units
            assert 1 <= num_saves <= most
            assert (num_loads == 0) if is_free else (1 <= num_loads <= most)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3))
def test_large_tensors_go_straight(
    use_orig_params: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed or each in a message of its own: the same, both ways."""
    model, optim = trained(
        "uneven", "counting", 1, nested=False, use_orig_params=use_orig_params
    )
    local = copy.deepcopy(optim.state_dict()["state"])
    expected = full(model, optim)["state"]
    for nbytes in (1, 16, 64):
        monkeypatch.setattr(exchange, "DIRECT_NBYTES", nbytes)
        assert_same_states(full(model, optim)["state"], expected)
        first = _rank0(model, optim)
        loaded = _load_rank0(model, optim, first)
        assert_same_states(loaded["state"], local)
        with in_form(model, "sharded"):
            sharded = FSDP.optim_state_dict(model, optim)
            loaded = FSDP.optim_state_dict_to_load(model, optim, sharded)
        assert_same_states(loaded["state"], local)


class _Allocations(TorchDispatchMode):
    """Adds up what torch.empty() gives."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.nbytes += result.nbytes
        return result


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_memory(
    rank: int, use_orig_params: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the result one unit's small tensors; with rank0_only no result elsewhere.

    Counted is everything that was allocated, kept or not; and the ranks' messages
    about what there is, which are small.
    """
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    model = fsdp(module, units={torch.nn.Linear}, use_orig_params=use_orig_params)
    optim = OPTIMIZERS["adamw_foreach"](model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.numel() else None
    optim.step()
    whole = 8 * 2 * 4 * (64 * 64 + 64)  # units, states, bytes, elements
    messages = 20 * 1024
    for nbytes, packed in ((exchange.DIRECT_NBYTES, whole), (4096, whole // 32)):
        monkeypatch.setattr(exchange, "DIRECT_NBYTES", nbytes)
        with _Allocations() as count:
            full(model, optim)
        assert whole <= count.nbytes < whole + packed + messages
        with _Allocations() as count:
            first = _rank0(model, optim)
        mine = 0 if rank > 0 else whole
        assert mine <= count.nbytes < mine + packed // 2 + messages
        with _Allocations() as count:
            _load_rank0(model, optim, first)
        assert count.nbytes < whole + packed // 2 + messages
