"""get_state_dict() and set_state_dict() of torch: every option, against one process."""

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from fsdp_c import fully_shard
from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import kept_mesh
from helpers.impl import FSDP, StateDictType, fsdp
from helpers.seeds import generator
from helpers.shared_folder import shared_folder

DIM = 6
BATCH = 12


class _Part(nn.Module):
    """Uneven rows, a frozen parameter, a buffer and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 7)
        self.down = nn.Linear(7, DIM)
        self.down.bias.requires_grad_(False)
        self.register_buffer("count", torch.arange(3.0))
        self.number = 0

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, state: int) -> None:
        self.number = state

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = inputs + self.down(torch.tanh(self.up(inputs)))
        return result


class _Model(nn.Module):
    """One part under two names, and one weight of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.part = _Part()
        self.parts = nn.ModuleList([_Part(), self.part])
        self.last = nn.Linear(DIM, DIM, bias=False)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.part(self.first(inputs))
        for part in self.parts:
            hidden = part(hidden)
        result: Tensor = self.last(hidden)
        return result


def _initial(seed: int) -> _Model:
    torch.manual_seed(seed)
    model = _Model()
    with torch.no_grad():
        model.part.count.add_(seed)
    model.part.number = seed
    return model


def _sharded(seed: int) -> Any:
    model = _initial(seed)
    for part in model.parts:
        fully_shard(part, shard_placement_fn=_by_columns)
    return fully_shard(model)


def _by_columns(param: nn.Parameter) -> Any:
    return Shard(1) if param.shape == (DIM, 7) else None


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parts = [p for n, p in model.named_parameters() if "part" in n and p.requires_grad]
    others = [p for n, p in model.named_parameters() if "part" not in n]
    return torch.optim.AdamW(
        [{"params": parts, "weight_decay": 0.1}, {"params": others}], lr=0.01
    )


def _train(
    model: Any, optim: torch.optim.Optimizer, num_steps: int, rank: int, size: int
) -> None:
    for step in range(num_steps):
        inputs = torch.randn(BATCH, DIM, generator=generator("dcp", step))
        model(inputs.chunk(size)[rank]).square().mean().backward()
        optim.step()
        optim.zero_grad()


def _whole(value: Any) -> Any:
    """Return a state dict with whole tensors; it is a collective."""
    return tree_map_only(DTensor, DTensor.full_tensor, value)


def _assert_alike(actual: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            _assert_alike(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):  # which of them, torch decides
        assert len(actual) == len(expected), where
        for index, (mine, wanted) in enumerate(zip(actual, expected, strict=True)):
            _assert_alike(mine, wanted, f"{where}[{index}]")
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6, msg=where)
    else:
        assert actual == expected, where


_OPTIONS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "sharded_on_cpu": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "full_on_rank_0": {"full_state_dict": True, "cpu_offload": True},
    "from_rank_0": {"full_state_dict": True, "broadcast_from_rank0": True},
    "flat_optimizer": {"flatten_optimizer_state_dict": True},
    "full_flat_optimizer": {
        "full_state_dict": True,
        "flatten_optimizer_state_dict": True,
    },
    "trainable": {"ignore_frozen_params": True, "strict": False},
    "not_strict": {"full_state_dict": True, "strict": False},
}


def _of_one_process(num_steps: int) -> tuple[_Model, torch.optim.Optimizer]:
    model = _initial(1)
    optim = _optimizer(model)
    _train(model, optim, num_steps, 0, 1)
    return model, optim


@pytest.mark.parametrize("name", _OPTIONS)
@distributed(world_size=3, device="cpu")
def test_options(rank: int, world_size: int, name: str) -> None:
    """What is got is one process's; set into another model, training goes on alike."""
    options = StateDictOptions(**_OPTIONS[name])
    reference, its_optim = _of_one_process(2)
    # One process knows nothing of ranks.
    plain = StateDictOptions(
        flatten_optimizer_state_dict=options.flatten_optimizer_state_dict,
        ignore_frozen_params=options.ignore_frozen_params,
    )
    expected = copy.deepcopy(get_state_dict(reference, its_optim, options=plain))
    model = _sharded(1)
    optim = _optimizer(model)
    _train(model, optim, 2, rank, world_size)
    got = get_state_dict(model, optim, options=options)
    is_whole = options.full_state_dict
    if is_whole and options.cpu_offload and rank > 0:
        assert got == ({}, {})
    else:
        actual = got if is_whole else [_whole(each) for each in got]
        _assert_alike(list(actual), list(expected))
    other = _sharded(2)
    other_optim = _optimizer(other)
    state: list[Any] = copy.deepcopy(list(got))
    if is_whole and options.cpu_offload:
        dist.broadcast_object_list(state)
    if options.broadcast_from_rank0 and rank > 0:
        state = [{}, {}]
    # Not set_state_dict(), which does nothing with an empty dictionary.
    missing, unexpected = set_model_state_dict(other, state[0], options=options)
    set_optimizer_state_dict(other, other_optim, state[1], options=options)
    frozen = [n for n, p in reference.named_parameters() if not p.requires_grad]
    assert list(missing) == (frozen if options.ignore_frozen_params else [])
    assert not unexpected
    if options.ignore_frozen_params:
        return
    _train(reference, its_optim, 2, 0, 1)
    _train(other, other_optim, 2, rank, world_size)
    _assert_alike(_whole(other.state_dict()), reference.state_dict())


@distributed(world_size=4, device="cpu")
def test_full_with_replicas(rank: int) -> None:
    """On all ranks, and on rank 0 alone, which half of the shard groups lack."""
    mesh = kept_mesh((2, 2), ("replicate", "shard"))
    model: Any = _initial(1).bfloat16()
    for part in model.parts:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    expected = _initial(1).bfloat16().state_dict()
    options = StateDictOptions(full_state_dict=True)
    _assert_alike(get_model_state_dict(model, options=options), expected)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    got = get_model_state_dict(model, options=options)
    _assert_alike(got, expected if rank == 0 else {})
    for name, value in got.items():
        if name.endswith("weight"):  # it has memory of its own
            value.zero_()
    got = get_model_state_dict(model, options=options)
    _assert_alike(got, expected if rank == 0 else {})


@pytest.mark.parametrize("keeps", [True, False])
@distributed(world_size=2, device="cpu")
def test_submodules(keeps: bool) -> None:
    options = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=keeps)
    model, reference = _sharded(1), _initial(1)
    got, expected = (
        get_model_state_dict(each, submodules={each.parts[0]}, options=options)
        for each in (model, reference)
    )
    assert ("parts.0.up.weight" if keeps else "up.weight") in got
    _assert_alike(got, expected)
    other = _sharded(2)
    target = other if keeps else other.parts[0]
    loaded = copy.deepcopy(got)
    options = StateDictOptions(full_state_dict=True, strict=not keeps)
    set_model_state_dict(target, loaded, options=options)
    wanted = get_model_state_dict(reference.parts[0])
    _assert_alike(_whole(other.parts[0].state_dict()), wanted)


@distributed(world_size=2, device="cpu")
def test_a_group_inside_a_model_on_meta(rank: int) -> None:
    """Rank 0 has the weights, the others memory for their rows only."""
    with torch.device("meta"):
        model: Any = _Model()
    for part in model.parts:
        fully_shard(part)
    fully_shard(model)
    full = get_model_state_dict(_initial(1)) if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    # torch assigns a tensor to each name: shared ones are to be shared again.
    model.last.weight = model.first.weight
    reference = _initial(1)
    assert not any(each.is_meta for each in model.parameters())
    _assert_alike(_whole(model.state_dict()), reference.state_dict())
    optim = _optimizer(model)
    its_optim = _optimizer(reference)
    _train(model, optim, 2, rank, 2)
    _train(reference, its_optim, 2, 0, 1)
    _assert_alike(_whole(model.state_dict()), reference.state_dict())


@pytest.mark.parametrize("width", [4, 64])  # 64: shards that other ranks may read
@pytest.mark.parametrize("offloads", [False, True])
@distributed(world_size=2)
def test_taken_before_the_first_forward(width: int, offloads: bool) -> None:
    """It shares the memory of the parameters for good, as programs rely on."""
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))
    model.double()
    policy = CPUOffloadPolicy() if offloads else OffloadPolicy()
    for layer in model:
        fully_shard(layer, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    model.to_empty(device="cpu" if offloads else TEST_DEVICE)
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param)
    dicts = [model.state_dict(), get_model_state_dict(model)]
    local = model[0].weight.to_local().detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ones = torch.ones(2, width, dtype=torch.float64, device=TEST_DEVICE)
    for _ in range(2):
        model(ones).sum().backward()
        optimizer.step()
        for taken in dicts:
            for name, value in model.state_dict().items():
                assert torch.equal(taken[name].to_local(), value.to_local())
                assert _address(taken[name]) == _address(value)
        optimizer.zero_grad()
    # And writes into it are the parameter's.
    dicts[0]["0.weight"].fill_(0.5)
    assert torch.equal(local, torch.full_like(local, 0.5))
    output = model(ones)
    expected = model[1].bias.full_tensor() + (
        model[1].weight.full_tensor().sum() * width * 0.5
        + (model[1].weight.full_tensor() * model[0].bias.full_tensor()).sum()
    )
    torch.testing.assert_close(output[0].cpu(), expected.cpu())
    del model, optimizer, output
    gc.collect()
    assert torch.equal(local, torch.full_like(local, 0.5))


def _address(value: DTensor) -> int:
    return value.to_local().data_ptr()


@distributed(world_size=2, device="cpu")
def test_optimizer_alone(rank: int) -> None:
    """Into an optimizer that has state, and groups with other options."""
    model = _sharded(1)
    optim = _optimizer(model)
    _train(model, optim, 2, rank, 2)
    options = StateDictOptions(full_state_dict=True)
    state = copy.deepcopy(get_optimizer_state_dict(model, optim, options=options))
    expected = copy.deepcopy(state)
    _train(model, optim, 1, rank, 2)
    for group in optim.param_groups:
        group["lr"] = 0.5
    set_optimizer_state_dict(model, optim, state, options=options)
    _assert_alike(get_optimizer_state_dict(model, optim, options=options), expected)
    assert [group["lr"] for group in optim.param_groups] == [0.01, 0.01]


@pytest.mark.parametrize("broadcast", [False, True])
@distributed(world_size=2, device="cpu")
def test_parameters_that_came_with_one_step(rank: int, broadcast: bool) -> None:
    """As those of a flat parameter of torch's FSDP1 do; torch's adds up their steps."""
    model: Any = fully_shard(nn.Linear(3, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    state = get_optimizer_state_dict(model, optimizer, options=full)
    step = torch.tensor(2.0)
    for its_state in state["state"].values():
        its_state["step"] = step
    given = {} if broadcast and rank else state
    set_optimizer_state_dict(model, optimizer, given, options=full)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    steps = [its_state["step"].item() for its_state in optimizer.state.values()]
    assert steps == [3.0, 3.0]


@pytest.mark.parametrize("assign", [False, True])
@distributed(world_size=2, device="cpu")
def test_a_load_that_swaps_parameters(assign: bool, rank: int) -> None:
    """The optimizer steps the same objects before and after it."""
    model = _sharded(1)
    optim = _optimizer(model)
    _train(model, optim, 2, rank, 2)
    state = copy.deepcopy(model.state_dict())
    expected = _whole(copy.deepcopy(state))
    _train(model, optim, 1, rank, 2)
    with pytest.MonkeyPatch.context() as patch:
        name = "_swap_module_params_on_conversion"
        patch.setattr(torch.__future__, name, True)
        model.load_state_dict(state, assign=assign)
    _assert_alike(_whole(model.state_dict()), expected)
    stepped = {id(p) for group in optim.param_groups for p in group["params"]}
    assert stepped <= {id(p) for p in model.parameters()}
    _train(model, optim, 1, rank, 2)
    assert not torch.equal(
        _whole(model.state_dict()["part.up.weight"]), expected["part.up.weight"]
    )


@distributed(world_size=2, device="cpu")
def test_files_of_the_other_api(rank: int) -> None:
    """torch.distributed.checkpoint: what FullyShardedDataParallel saved, and back."""
    reference, its_optim = _of_one_process(2)
    wrapped: Any = fsdp(_initial(1), units={_Part}, use_orig_params=True)
    optim = _optimizer(wrapped)
    _train(wrapped, optim, 2, rank, 2)
    kind = StateDictType.SHARDED_STATE_DICT
    with shared_folder() as folder:
        with FSDP.state_dict_type(wrapped, kind):
            states = FSDP.optim_state_dict(wrapped, optim)
            dcp.save(
                {"model": wrapped.state_dict(), "optimizer": states},
                checkpoint_id=folder / "wrapped",
            )
        model = _sharded(2)
        its_own = _optimizer(model)
        got = get_state_dict(model, its_own)
        loaded: dict[str, Any] = {"model": got[0], "optimizer": got[1]}
        dcp.load(loaded, checkpoint_id=folder / "wrapped")
        set_state_dict(
            model,
            its_own,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        for each, optimizer, size in (
            (reference, its_optim, 1),
            (model, its_own, 2),
        ):
            _train(each, optimizer, 2, rank if size > 1 else 0, size)
        _assert_alike(_whole(model.state_dict()), reference.state_dict())
        got = get_state_dict(model, its_own)
        dcp.save({"model": got[0], "optimizer": got[1]}, checkpoint_id=folder / "rows")
        with FSDP.state_dict_type(wrapped, kind):
            back: dict[str, Any] = {
                "model": wrapped.state_dict(),
                "optimizer": FSDP.optim_state_dict(wrapped, optim),
            }
            dcp.load(back, checkpoint_id=folder / "rows")
            wrapped.load_state_dict(back["model"])
            optim.load_state_dict(
                FSDP.optim_state_dict_to_load(wrapped, optim, back["optimizer"])
            )
        _train(reference, its_optim, 1, 0, 1)
        _train(wrapped, optim, 1, rank, 2)
        _assert_alike(wrapped.state_dict(), reference.state_dict())


@distributed(world_size=2, device="cpu")
def test_inside_forward_and_backward(rank: int) -> None:
    """What a signal handler or another thread saves there: the sharded parameters."""
    model = _sharded(1)
    optim = _optimizer(model)
    _train(model, optim, 1, rank, 2)
    wanted = model.state_dict()
    seen: list[dict[str, Any]] = []

    def take(*_: Any) -> None:
        seen.append(model.state_dict())
        seen.append(model.state_dict(keep_vars=True))
        assert seen[-1]["first.weight"] is optim.param_groups[1]["params"][0]

    model.parts[0].register_forward_hook(take)
    model.parts[0].register_full_backward_hook(take)
    model(torch.ones(1, DIM)).sum().backward()
    assert len(seen) == 4
    for got in seen:
        assert list(got) == list(wanted)
        _assert_alike(_whole(got), _whole(wanted))
        for name, value in wanted.items():
            if isinstance(value, DTensor):
                assert _address(got[name]) == _address(value)
    _train(model, optim, 1, rank, 2)
    reference, its_optim = _of_one_process(1)
    reference(torch.ones(2, DIM)).sum().div(2).backward()
    _train(reference, its_optim, 1, 0, 1)
    _assert_alike(_whole(model.state_dict()), reference.state_dict())
