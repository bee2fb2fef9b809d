"""Optimizers that need whole parameters, against the unsharded model and optimizer.

The reference steps the very gradients that the sharded model has, so the values have to
be equal to the bit.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp_c import (
    checkpoint,
    fully_shard,
    optimizer_in_backward,
    whole_parameter_optimizer,
)
from fsdp_c._capture.checks import check_optimizer
from fsdp_c._whole import owned
from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import first_ranks, hybrid_groups, kept_mesh
from helpers.impl import FSDP, CPUOffload, ShardingStrategy, StateDictType
from helpers.matrix_optimizers import ANY_SHAPE, Shampoo, TensorNorm, muon, sgd
from helpers.transports import c10d_only
from helpers.whole_runs import (
    Run,
    assert_states,
    build,
    copy_values,
    is_hidden,
    plain_states,
    shard,
    wholes_of,
)


@pytest.mark.parametrize("optimizer", ANY_SHAPE)
@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=(2, 3, 4))
def test_equal_to_the_unsharded_optimizer(api: str, optimizer: str) -> None:
    """To the bit, for optimizers of parameters of any shape."""
    Run(api, ANY_SHAPE[optimizer]).train(3)


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=(2, 3, 4))
def test_muon_beside_adamw(api: str) -> None:
    """Muon for the hidden matrices and AdamW for the rest, in one optimizer."""
    run = Run(
        api, muon, is_hidden, rest=lambda params: torch.optim.AdamW(params, lr=0.01)
    )
    run.train(3)
    owners = run.optimizer.owners
    assert set(owners) == {
        n
        for n in run.names
        if is_hidden(n, torch.Size((1, 1))) and n.endswith("weight")
    }
    assert set(owners.values()) == set(range(dist.get_world_size()))


@distributed(world_size=(2, 4))
def test_a_flat_parameter_is_stepped_in_its_parts() -> None:
    """With use_orig_params=False all parameters of a unit have to be chosen."""
    model = shard("FSDP flat", build())
    with pytest.raises(ValueError, match="lies in a flat parameter with others"):
        whole_parameter_optimizer(model, muon, is_hidden)
    Run("FSDP flat", TensorNorm).train(3)


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@distributed(world_size=(2, 3))
def test_strategies(strategy: str) -> None:
    """Without resharding, and where each rank has the whole already."""
    options = {"sharding_strategy": ShardingStrategy[strategy]}
    Run("FSDP", TensorNorm, **options).train(3)
    if dist.get_world_size() == 2:
        Run("FSDP flat", Shampoo, **options).train(3)


@distributed(world_size=4)
def test_replicas_do_nothing_twice() -> None:
    """One owner over all replicas, in either API."""
    with hybrid_groups(2, 2) as (shards, replicas):
        run = Run(
            "FSDP",
            TensorNorm,
            process_group=(shards, replicas),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        )
        run.train(3)
        assert set(run.optimizer.owners.values()) == {0, 1, 2, 3}
        del run
    mesh = kept_mesh((2, 2), ("rep", "shard"))
    run = Run("fully_shard", Shampoo, mesh=mesh)
    run.train(3)
    assert set(run.optimizer.owners.values()) == {0, 1, 2, 3}


@distributed(world_size=2)
def test_offloaded_shards() -> None:
    """Shards, gradients and owners' states in host memory."""
    Run("FSDP", TensorNorm, cpu_offload=CPUOffload(offload_params=True)).train(3)
    Run("fully_shard", TensorNorm, offload_policy=CPUOffloadPolicy()).train(3)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


# What else a step has to do ------------------------------------------------------


@distributed(world_size=(2, 3))
def test_schedules_clipping_accumulation_and_a_scaler() -> None:
    """Everything that acts on sharded gradients or on options acts before."""
    run = Run("FSDP", sgd)
    optimizers = (run.optimizer, *run.plain_optimizers)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]
    scaler = torch.amp.GradScaler(TEST_DEVICE, init_scale=4.0)
    for number in range(3):
        run.optimizer.zero_grad()
        with run.model.no_sync():
            run.backward(10 * number)
        run.backward(10 * number + 1)
        scaler.scale(torch.ones((), device=TEST_DEVICE))  # makes its scale
        scaler.unscale_(run.optimizer)
        run.model.clip_grad_norm_(0.1)
        run.take_gradients()
        scaler.step(run.optimizer)
        scaler.update()
        for each in run.plain_optimizers:
            each.step()
        for scheduler in schedulers:
            scheduler.step()
    run.check()
    assert run.optimizer.param_groups[0]["lr"] == 0.1 / 8
    assert run.optimizer.optimizer.param_groups[0]["lr"] == 0.1 / 4  # of the last step


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=2)
def test_groups_with_options_of_their_own(api: str) -> None:
    """Groups are chosen by function or by name; one is of frozen parameters."""
    run = Run(api, sgd)
    named = dict(run.plain.named_parameters())
    heads = ["head.weight", "norm.bias"]
    run.optimizer = whole_parameter_optimizer(
        run.model,
        sgd,
        [
            {"params": heads, "lr": 0.7},
            {"params": is_hidden},
            {"params": ["norm.weight"]},
        ],
    )
    hidden = [p for name, p in named.items() if is_hidden(name, p.shape)]
    for model in (run.model, run.plain):
        model.norm.weight.requires_grad_(False)
    run.plain_optimizers = [
        sgd([{"params": [named[n] for n in heads], "lr": 0.7}, {"params": hidden}])
    ]
    run.train(2)
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.7, 0.1, 0.1]


@distributed(world_size=3)
def test_a_parameter_that_one_rank_uses(rank: int) -> None:
    """It is stepped on its owner, whichever rank that is; one that none uses is not."""
    run = Run("FSDP", TensorNorm)
    for number in range(3):
        run.optimizer.zero_grad()
        run.backward(number)
        run.take_gradients()
        for name, param in run.model.named_parameters():
            if "head" in name:
                param.grad = None
        run.plain.head.weight.grad = None
        for each in (*run.plain_optimizers, run.optimizer):
            each.step()
    run.check()
    assert "head.weight" not in {n for n, s in plain_states(run).items() if s}


@distributed(world_size=2)
def test_a_closure_runs_before_the_step() -> None:
    run = Run("FSDP", sgd)

    def closure() -> float:
        run.optimizer.zero_grad()
        run.backward(0)
        run.take_gradients()
        return 2.5

    assert run.optimizer.step(closure) == 2.5
    run.plain_optimizers[0].step()
    run.check()


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=2)
def test_wholes_are_there_in_rounds_only(
    monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    """An owner has one round's wholes at a time; between steps it has none.

    But those that its shard has.
    """
    monkeypatch.setattr("fsdp_c._whole.optimizer.ROUND_NBYTES", 4 * 12 * 12)
    seen: list[int] = []

    class Watched(TensorNorm):
        def step(self, closure: Any = None) -> None:
            params = self.param_groups[0]["params"]
            seen.append(sum(p.numel() for p in params if p.grad is not None))
            super().step(closure)

    run = Run(api, Watched)
    run.plain_optimizers = [TensorNorm(run.plain.parameters())]
    run.train(2)
    total = sum(param.numel() for param in run.plain.parameters())
    mine = [whole for whole in run.optimizer._dealt.wholes if whole.is_mine]
    at_home = sum(each.shape.numel() for each in mine if not each.travels)
    assert (at_home > 0) == (api == "FSDP")
    assert len(seen) == 2 * len({each.round for each in mine})
    assert run.optimizer._dealt.num_rounds >= 2
    # A round and the largest parameter.
    assert max(seen) <= 12 * 12 + 13 * 12 + at_home
    assert 0.3 * total <= sum(seen) / 2 <= 0.7 * total
    for shown in run.optimizer._dealt.shown.values():
        assert shown.untyped_storage().nbytes() == shown.itemsize
        assert shown.isnan().all()


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=(2, 3))
def test_the_next_round_is_under_way(monkeypatch: pytest.MonkeyPatch, api: str) -> None:
    """Where exchanges run beside the host: as gloo's do, so values show it here."""
    monkeypatch.setattr("fsdp_c._whole.optimizer.ROUND_NBYTES", 2 * 4 * 12 * 9)
    monkeypatch.setattr("fsdp_c._whole.owned.runs_beside", lambda *_: True)
    seen: list[str] = []
    begin = owned.begin_exchange_in

    def begin_exchange(*args: Any) -> Any:
        if "gradients" in args[-1]:
            seen.append("begin")
        return begin(*args)

    monkeypatch.setattr("fsdp_c._whole.owned.begin_exchange_in", begin_exchange)

    def scatter(*args: Any) -> Any:
        seen.append("home")
        return owned.scatter(*args)

    monkeypatch.setattr("fsdp_c._whole.optimizer.scatter", scatter)

    with c10d_only():
        run = Run(api, TensorNorm)
        run.step(0)
        if api == "fully_shard":  # each round has something that travels
            num_rounds = run.optimizer._dealt.num_rounds
            middle = ["begin", "home"] * (num_rounds - 1)
            assert num_rounds > 2
            assert seen == ["begin", *middle, "home"]
        run.train(2, first=1)


@distributed(world_size=2)
def test_a_model_that_is_sharded_later() -> None:
    """Before the first step, in place; a schedule's options stay."""
    model, plain = build(), build()
    optimizer = whole_parameter_optimizer(model, muon, is_hidden, rest=adamw)
    named = dict(plain.named_parameters())
    hidden = [n for n, p in named.items() if is_hidden(n, p.shape)]
    optimizers = [
        muon([named[n] for n in hidden]),
        adamw([p for n, p in named.items() if n not in hidden]),
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]
    schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    shard("fully_shard", model)
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.arange(8).to(TEST_DEVICE)) ** 2).mean().backward()
        grads = wholes_of(model, grads=True)
        for name, param in named.items():
            param.grad = grads[name]
        for each in (*optimizers, optimizer, *schedulers):
            each.step()
    assert set(optimizer.owners.values()) == {0, 1}
    for name, value in wholes_of(model).items():
        assert value is not None
        assert torch.equal(value, named[name])
    late = build()
    optimizer = whole_parameter_optimizer(late, sgd)
    late(torch.arange(8).to(TEST_DEVICE)).sum().backward()
    optimizer.step()
    shard("fully_shard", late)
    with pytest.raises(RuntimeError, match="sharded after the first step"):
        optimizer.step()


def test_a_model_that_is_not_sharded() -> None:
    """It is stepped as without."""
    models = [nn.Linear(4, 3), nn.Linear(4, 3)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        whole_parameter_optimizer(models[0], TensorNorm),
        TensorNorm(models[1].parameters()),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)
    states = [each.state_dict()["state"] for each in optimizers]
    assert states[0][0].keys() == states[1][0].keys()
    optimizers[0].load_state_dict(optimizers[0].state_dict())


# What is refused -------------------------------------------------------------------


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


@distributed(world_size=2)
def test_refused(rank: int) -> None:
    """By name, and before anything is changed."""
    model = shard("FSDP", build())

    def refuses(error: type[Exception], match: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(error, match=match):
            whole_parameter_optimizer(*args, **kwargs)

    refuses(ValueError, "no parameter 'heads'", model, sgd, ["heads"])
    refuses(
        ValueError, "'head.weight' is chosen twice", model, sgd, ["head.weight"] * 2
    )
    refuses(ValueError, "no parameter is chosen", model, sgd, lambda name, shape: False)
    refuses(
        TypeError, "params must be a function of name", model, sgd, model.parameters()
    )
    refuses(TypeError, "make must return a torch.optim.Optimizer", model, list)
    refuses(TypeError, "rest must return", model, sgd, is_hidden, rest=list)
    refuses(
        ValueError,
        "LBFGS.* needs a closure",
        model,
        lambda p: torch.optim.LBFGS(p[0]["params"]),
    )
    refuses(TypeError, "model must be a module", 3, sgd)
    optimizer = whole_parameter_optimizer(model, sgd)
    with pytest.raises(ValueError, match="takes no further parameter group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match="train without capture_step"):
        check_optimizer(optimizer, torch.device(TEST_DEVICE))
    other = shard("FSDP", build())
    with pytest.raises(ValueError, match="make it without optimizer_in_backward"):
        optimizer_in_backward(other, lambda _: whole_parameter_optimizer(other, sgd))
    optimizer_in_backward(other, sgd)
    refuses(ValueError, "steps an optimizer in backward", other, sgd)


@distributed(world_size=2)
def test_an_optimizer_that_fails_names_rank_and_parameters(rank: int) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if dist.get_rank() == 1:
                raise ArithmeticError("no inverse")
            super().step(closure)

    run = Run("FSDP", lambda params: Failing(params, lr=0.1))
    run.backward(0)
    if rank == 1:
        match = r"Failing failed on rank 1, which stepped the parameters .*no inverse"
        with pytest.raises(RuntimeError, match=match):
            run.optimizer.step()
    else:
        run.optimizer.step()  # does not wait for it
    names = [name for name, owner in run.optimizer.owners.items() if owner == 1]
    before, after = build().state_dict(), wholes_of(run.model)
    assert all(
        torch.equal(before[name], after[name]) == (name in names) for name in after
    )


# State dicts -------------------------------------------------------------------


def mixed(api: str, **options: Any) -> Run:
    return Run(api, muon, is_hidden, rest=adamw, **options)


BUILDERS: dict[str, Callable[[str], Run]] = {
    "mixed": mixed,
    "shampoo": lambda api: Run(api, Shampoo),
    "adafactor": lambda api: Run(api, ANY_SHAPE["adafactor"]),
    "norm": lambda api: Run(api, TensorNorm),
}


@pytest.mark.parametrize("case", BUILDERS)
@distributed(world_size=(2, 3, 4))
def test_full_state_dicts_are_the_unsharded_optimizers(case: str) -> None:
    """Names, shapes and values; loaded again, training goes on to the bit."""
    run = BUILDERS[case]("FSDP")
    run.train(2)
    with FSDP.state_dict_type(run.model, StateDictType.FULL_STATE_DICT):
        saved = FSDP.optim_state_dict(run.model, run.optimizer)
    assert_states(saved["state"], plain_states(run))
    other = BUILDERS[case]("FSDP")
    copy_values(run, other)
    loaded = FSDP.optim_state_dict_to_load(other.model, other.optimizer, saved)
    other.optimizer.load_state_dict(loaded)
    other.train(2, first=2)


@pytest.mark.parametrize("case", BUILDERS)
@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@pytest.mark.parametrize("broadcast", [False, True])
@distributed(world_size=(2, 3))
def test_full_states_of_torch(rank: int, broadcast: bool, api: str, case: str) -> None:
    """Whole states are not taken for parts of a parameter; one of the other API."""
    run = BUILDERS[case]("fully_shard" if api == "FSDP" else "FSDP")
    run.train(2)
    options = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(run.model, run.optimizer, options=options)
    other = BUILDERS[case](api)
    copy_values(run, other)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    given = {} if broadcast and rank > 0 else saved
    set_optimizer_state_dict(other.model, other.optimizer, given, options=options)
    other.train(2, first=2)


@pytest.mark.parametrize("case", BUILDERS)
@pytest.mark.parametrize("flattened", [False, True])
@distributed(world_size=(2, 3))
def test_torch_distributed_checkpoint(
    tmp_path: Path, flattened: bool, case: str
) -> None:
    """Saved and loaded by it into a model that has not begun."""
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    run = BUILDERS[case]("fully_shard")
    run.train(2)
    saved = get_optimizer_state_dict(run.model, run.optimizer, options=options)
    if not flattened:
        assert_states(saved["state"], plain_states(run))
    dcp.save(saved, checkpoint_id=str(tmp_path / "dcp"))
    other = BUILDERS[case]("fully_shard")
    copy_values(run, other)
    wanted = get_optimizer_state_dict(other.model, other.optimizer, options=options)
    dcp.load(wanted, checkpoint_id=str(tmp_path / "dcp"))
    set_optimizer_state_dict(other.model, other.optimizer, wanted, options=options)
    other.train(2, first=2)


@pytest.mark.parametrize("case", BUILDERS)
@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=3)
def test_fsdp_c_checkpoint(tmp_path: Path, api: str, case: str) -> None:
    """Saved and loaded by fsdp_c, in the other API, too."""
    run = BUILDERS[case](api)
    run.train(2)
    checkpoint.save(tmp_path / "c", run.model, run.optimizer)
    for other_api in ("FSDP", "fully_shard"):
        other = BUILDERS[case](other_api)
        copy_values(run, other)
        checkpoint.load(tmp_path / "c", other.model, other.optimizer)
        other.train(2, first=2)


@distributed(world_size=4)
def test_resume_at_another_number_of_ranks(tmp_path: Path) -> None:
    """4 ranks save, 2 and 3 go on, in the other API."""
    run = BUILDERS["shampoo"]("FSDP")
    run.train(2)
    checkpoint.save(tmp_path / "c", run.model, run.optimizer)
    expected = plain_states(run)
    for size in (2, 3):
        with first_ranks(size) as group:
            if group is None:
                continue
            other = Run("FSDP", Shampoo, process_group=group)
            checkpoint.load(
                tmp_path / "c", other.model, other.optimizer, process_group=group
            )
            with FSDP.state_dict_type(other.model, StateDictType.FULL_STATE_DICT):
                loaded = FSDP.optim_state_dict(other.model, other.optimizer)
            assert_states(loaded["state"], expected)
            for name, value in wholes_of(other.model).items():
                assert value is not None
                assert torch.equal(value, run.plain.state_dict()[name])
            del other


class Small(nn.Module):
    """One element, which one rank has, and a parameter that may have none."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.other = nn.Parameter(torch.ones(shape))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * self.gain + self.other.sum()


@pytest.mark.parametrize(
    ("api", "shape"),
    [
        ("FSDP", (1,)),
        ("fully_shard", (1,)),
        ("FSDP", (0, 3)),
        ("fully_shard", (0, 3)),
        ("FSDP", ()),
        ("FSDP flat", ()),
    ],
)
@distributed(world_size=(3, 4))
def test_states_of_ranks_and_parameters_without_elements(
    api: str, shape: tuple[int, ...]
) -> None:
    """Loaded, all ranks have begun, and torch does not step on some of them.

    Momenta of a 0-dim parameter have one value per element, as those of others.
    """
    run, other = (Run(api, adamw, build=lambda: Small(shape)) for _ in range(2))
    run.train(2)
    expected = plain_states(run)
    assert set(expected) == {"gain", "other"}
    for _ in range(2):
        copy_values(run, other)
        other.optimizer.load_state_dict(run.optimizer.state_dict())
        saved = get_optimizer_state_dict(
            other.model, other.optimizer, options=StateDictOptions(full_state_dict=True)
        )
        assert_states(saved["state"], expected)
        run = other
    other.train(2, first=2)


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)])
@distributed(world_size=4)
def test_tensor_parallel_matrices_are_whole_over_both_meshes(
    shape: tuple[int, ...],
) -> None:
    """fully_shard over rows or replicas, tensor parallelism over columns or rows."""
    data_names = ("dp",) if len(shape) == 2 else ("dp", "shard")
    mesh = kept_mesh(shape, (*data_names, "tp"))
    plain = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 6)).to(TEST_DEVICE)
    torch.manual_seed(5)
    for param in plain.parameters():
        nn.init.normal_(param)
        dist.broadcast(param.data, 0)
    model = copy.deepcopy(plain)
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], styles)
    fully_shard(model, mesh=mesh[data_names])
    optimizer = whole_parameter_optimizer(model, TensorNorm)
    assert sorted(set(optimizer.owners.values())) == [0, 1, 2, 3]
    num_owned = torch.tensor(optimizer.memory_stats()["num_params"])
    dist.all_reduce(num_owned)
    assert num_owned == 4  # each by one of the four ranks
    reference = TensorNorm(plain.parameters())
    for number in range(3):
        generator = torch.Generator("cpu").manual_seed(
            10 * number + mesh["dp"].get_local_rank()
        )
        inputs = torch.randn(4, 12, generator=generator, device="cpu").to(TEST_DEVICE)
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        for mine, its in zip(plain.parameters(), model.parameters(), strict=True):
            assert isinstance(its.grad, DTensor)
            mine.grad = its.grad.full_tensor()
        reference.step()
        optimizer.step()
    for mine, its in zip(plain.parameters(), model.parameters(), strict=True):
        assert isinstance(its, DTensor)
        assert torch.equal(its.full_tensor(), mine)
    states = get_optimizer_state_dict(model, optimizer)["state"]
    names = {param: name for name, param in plain.named_parameters()}
    assert_states(states, {names[p]: state for p, state in reference.state.items()})


class _Rows(torch.optim.Optimizer):
    """Keeps one number per row."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            sums = self.state[param].setdefault("row", torch.zeros(len(param)))
            sums += param.grad.sum(1)


@pytest.mark.cpu_only("on accelerators parameters are aligned, and parts are others")
@distributed(world_size=2)
def test_factor_with_the_shape_of_a_part(rank: int) -> None:
    """Rank 0 has two elements of a matrix of two rows, rank 1 the other six."""
    module = nn.Module()
    module.bias = nn.Parameter(torch.ones(4))
    module.weight = nn.Parameter(torch.ones(2, 4))
    model = FSDP(module, use_orig_params=True)
    assert model.weight.numel() == (2, 6)[rank]
    optimizer = whole_parameter_optimizer(model, _Rows, ["weight"])
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    expected = torch.full((2,), 4.0)
    optimizer.load_state_dict(optimizer.state_dict())
    for state in optimizer.optimizer.state.values():
        assert torch.equal(state["row"], expected)
    saved = FSDP.optim_state_dict(model, optimizer)
    assert torch.equal(saved["state"]["weight"]["row"], expected)
    fresh = whole_parameter_optimizer(model, _Rows, ["weight"])
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, saved))
    loaded = FSDP.optim_state_dict(model, fresh)["state"]["weight"]["row"]
    assert torch.equal(loaded, expected)
