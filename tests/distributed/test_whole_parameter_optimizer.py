"""Optimizers that need whole parameters, against the unsharded model and optimizer.

The reference steps the very gradients that the sharded model has, so the values have to
be equal to the bit.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp_c import (
    checkpoint,
    fully_shard,
    optimizer_in_backward,
    whole_parameter_optimizer,
)
from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import hybrid_groups, kept_mesh
from helpers.impl import FSDP, CPUOffload, ShardingStrategy, StateDictType, fsdp
from helpers.matrix_optimizers import ANY_SHAPE, Shampoo, TensorNorm, muon, sgd
from helpers.reference import clean_name

Make = Callable[[Any], torch.optim.Optimizer]
APIS = ("fsdp1", "flat", "fully_shard")


class Net(nn.Module):
    """Matrices of several shapes, uneven over any number of ranks, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 7 + i), nn.Tanh(), nn.Linear(7 + i, 12))
            for i in range(3)
        )
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        result: Tensor = self.head(self.norm(hidden))
        return result


def is_hidden(name: str, shape: torch.Size) -> bool:
    return len(shape) == 2 and name.startswith("blocks")


def build() -> Net:
    torch.manual_seed(3)
    return Net().to(TEST_DEVICE)


def shard(api: str, model: nn.Module, **options: Any) -> Any:
    """Return ``model`` with units; ``api`` is one of APIS."""
    if api == "fully_shard":
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)
    return fsdp(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        use_orig_params=api == "fsdp1",
        **options,
    )


def wholes_of(model: Any, *, grads: bool = False) -> dict[str, Tensor | None]:
    """Return whole parameters, or gradients, by name. Collective."""
    found: dict[str, Tensor | None] = {}
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model, writeback=False, with_grads=grads):
            for name, param in model.named_parameters():
                value = param.grad if grads else param
                found[clean_name(name)] = (
                    None if value is None else value.detach().clone().cpu()
                )
        return found
    for name, param in model.named_parameters():
        value = param.grad if grads else param.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        found[name] = None if value is None else value.detach().clone().cpu()
    return found


class Run:
    """A sharded model with an optimizer of wholes, and the unsharded ones."""

    def __init__(
        self,
        api: str,
        make: Make,
        params: Any = None,
        *,
        rest: Make | None = None,
        **options: Any,
    ) -> None:
        # The gradients of flat parameters cannot be seen whole: all ranks have the
        # same data, so that the unsharded model has the same gradients of its own.
        self.has_same_data = api == "flat"
        self.plain = build().cpu()
        self.model = shard(api, build(), **options)
        self.optimizer = whole_parameter_optimizer(self.model, make, params, rest=rest)
        named = dict(self.plain.named_parameters())
        self.names = list(named)
        chosen = [n for n, p in named.items() if params is None or params(n, p.shape)]
        self.plain_optimizers = [make([named[name] for name in chosen])]
        if rest is not None:
            others = [p for name, p in named.items() if name not in chosen]
            self.plain_optimizers.append(rest(others))

    def backward(self, number: int) -> None:
        """Run on one batch, each rank on its own."""
        seed = 100 * number + (0 if self.has_same_data else dist.get_rank())
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 13, (4, 6), generator=generator)
        (self.model(tokens.to(TEST_DEVICE)) ** 2).mean().backward()
        if self.has_same_data:
            (self.plain(tokens) ** 2).mean().backward()

    def take_gradients(self) -> None:
        """Give the unsharded model the gradients that the sharded one has."""
        if not self.has_same_data:
            grads = wholes_of(self.model, grads=True)
            for name, param in self.plain.named_parameters():
                param.grad = grads[name]

    def step(self, number: int) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        self.plain.zero_grad()
        self.backward(number)
        self.take_gradients()
        for each in (*self.plain_optimizers, self.optimizer):
            each.step()

    def check(self) -> None:
        """Compare all parameters, to the bit."""
        values = wholes_of(self.model)
        for name, param in self.plain.named_parameters():
            value = values[name]
            assert value is not None
            assert torch.equal(value, param.detach()), (name, value, param)

    def train(self, num_steps: int, first: int = 0) -> None:
        for number in range(first, first + num_steps):
            self.step(number)
        self.check()


@pytest.mark.parametrize("optimizer", ANY_SHAPE)
@pytest.mark.parametrize("api", ["fsdp1", "fully_shard"])
@distributed(world_size=(2, 3, 4))
def test_equal_to_the_unsharded_optimizer(api: str, optimizer: str) -> None:
    """To the bit, for optimizers of parameters of any shape."""
    Run(api, ANY_SHAPE[optimizer]).train(3)


@pytest.mark.parametrize("api", ["fsdp1", "fully_shard"])
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
    model = shard("flat", build())
    with pytest.raises(ValueError, match="lies in a flat parameter with others"):
        whole_parameter_optimizer(model, muon, is_hidden)
    Run("flat", TensorNorm).train(3)


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@distributed(world_size=(2, 3))
def test_strategies(strategy: str) -> None:
    """Without resharding, and where each rank has the whole already."""
    options = {"sharding_strategy": ShardingStrategy[strategy]}
    Run("fsdp1", TensorNorm, **options).train(3)
    if dist.get_world_size() == 2:
        Run("flat", Shampoo, **options).train(3)


@distributed(world_size=4)
def test_replicas_do_nothing_twice() -> None:
    """One owner over all replicas, in either API."""
    with hybrid_groups(2, 2) as (shards, replicas):
        run = Run(
            "fsdp1",
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
    Run("fsdp1", TensorNorm, cpu_offload=CPUOffload(offload_params=True)).train(3)
    Run("fully_shard", TensorNorm, offload_policy=CPUOffloadPolicy()).train(3)


# What else a step has to do ------------------------------------------------------


@distributed(world_size=(2, 3))
def test_schedules_clipping_accumulation_and_a_scaler() -> None:
    """Everything that acts on sharded gradients or on options acts before."""
    run = Run("fsdp1", sgd)
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


@pytest.mark.parametrize("api", ["fsdp1", "fully_shard"])
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
    run = Run("fsdp1", TensorNorm)
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
    run = Run("fsdp1", sgd)

    def closure() -> float:
        run.optimizer.zero_grad()
        run.backward(0)
        run.take_gradients()
        return 2.5

    assert run.optimizer.step(closure) == 2.5
    run.plain_optimizers[0].step()
    run.check()


@pytest.mark.parametrize("api", ["fsdp1", "fully_shard"])
@distributed(world_size=2)
def test_wholes_are_there_in_rounds_only(
    monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    """An owner has one round's wholes at a time; between steps it has none."""
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
    assert len(seen) >= 6
    assert max(seen) <= 12 * 12 + 13 * 12  # a round and the largest parameter
    assert 0.3 * total <= sum(seen) / 2 <= 0.7 * total
    for shown in run.optimizer._dealt.shown.values():
        assert shown.untyped_storage().nbytes() == shown.itemsize
        assert shown.isnan().all()


# What is refused -------------------------------------------------------------------


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


@distributed(world_size=2)
def test_refused(rank: int) -> None:
    """By name, and before anything is changed."""
    model = shard("fsdp1", build())

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
    refuses(ValueError, "sharded|wrapped", nn.Linear(2, 2), sgd)
    refuses(TypeError, "model must be a module", 3, sgd)
    optimizer = whole_parameter_optimizer(model, sgd)
    with pytest.raises(ValueError, match="takes no further parameter group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    other = shard("fsdp1", build())
    optimizer_in_backward(other, sgd)
    refuses(ValueError, "steps an optimizer in backward", other, sgd)


@distributed(world_size=2)
def test_an_optimizer_that_fails_names_rank_and_parameters(rank: int) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if dist.get_rank() == 1:
                raise ArithmeticError("no inverse")
            super().step(closure)

    run = Run("fsdp1", lambda params: Failing(params, lr=0.1))
    run.backward(0)
    if rank == 1:
        match = r"Failing failed on rank 1, which stepped the parameters .*no inverse"
        with pytest.raises(RuntimeError, match=match):
            run.optimizer.step()
    else:
        run.optimizer.step()  # does not wait for it
    names = [name for name, owner in run.optimizer.owners.items() if owner == 1]
    before, after = build().cpu().state_dict(), wholes_of(run.model)
    assert all(
        torch.equal(before[name], after[name]) == (name in names) for name in after
    )


# State dicts -------------------------------------------------------------------


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def mixed(api: str, **options: Any) -> Run:
    return Run(api, muon, is_hidden, rest=adamw, **options)


def plain_states(run: Run) -> dict[str, dict[str, Any]]:
    """Return the unsharded optimizers' states by parameter name."""
    names = {param: name for name, param in run.plain.named_parameters()}
    return {
        names[param]: state
        for optimizer in run.plain_optimizers
        for param, state in optimizer.state.items()
    }


def assert_states(
    given: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Mapping[str, Any]]
) -> None:
    assert given.keys() == expected.keys()
    for name, state in expected.items():
        assert given[name].keys() == state.keys(), name
        for key, value in state.items():
            own = given[name][key]
            if isinstance(own, DTensor):
                own = own.full_tensor()
            if isinstance(value, Tensor):
                assert own.shape == value.shape, (name, key, own.shape)
                assert torch.equal(own.cpu(), value), (name, key)
            else:
                assert own == value, (name, key)


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
    run = BUILDERS[case]("fsdp1")
    run.train(2)
    with FSDP.state_dict_type(run.model, StateDictType.FULL_STATE_DICT):
        saved = FSDP.optim_state_dict(run.model, run.optimizer)
    assert_states(saved["state"], plain_states(run))
    other = BUILDERS[case]("fsdp1")
    copy_values(run, other)
    loaded = FSDP.optim_state_dict_to_load(other.model, other.optimizer, saved)
    other.optimizer.load_state_dict(loaded)
    other.train(2, first=2)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def copy_values(source: Run, target: Run) -> None:
    """Give another run the values, and its unsharded optimizers the states."""
    target.plain.load_state_dict(source.plain.state_dict())
    for one, other in zip(
        source.plain_optimizers, target.plain_optimizers, strict=True
    ):
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        for mine, its in zip(params_of(one), params_of(other), strict=True):
            if mine in one.state:  # torch's load casts
                other.state[its] = copy.deepcopy(one.state[mine])
    values = wholes_of(source.model)
    if isinstance(target.model, FSDP):
        with FSDP.summon_full_params(target.model), torch.no_grad():
            for name, param in target.model.named_parameters():
                param.copy_(values[clean_name(name)])
        return
    state = target.model.state_dict()
    for name, value in state.items():
        whole = values[name]
        assert whole is not None
        rows = value.to_local()
        begin = sum(
            torch.chunk(whole, dist.get_world_size())[rank].shape[0]
            for rank in range(dist.get_rank())
            if rank < len(torch.chunk(whole, dist.get_world_size()))
        )
        rows.copy_(whole[begin : begin + len(rows)])


@pytest.mark.parametrize("case", BUILDERS)
@distributed(world_size=(2, 3))
def test_torch_distributed_checkpoint(tmp_path: Path, case: str) -> None:
    """Saved and loaded by it into a model that has not begun."""
    run = BUILDERS[case]("fully_shard")
    run.train(2)
    saved = get_optimizer_state_dict(run.model, run.optimizer)
    assert_states(saved["state"], plain_states(run))
    dcp.save(saved, checkpoint_id=str(tmp_path / "dcp"))
    other = BUILDERS[case]("fully_shard")
    copy_values(run, other)
    wanted = get_optimizer_state_dict(other.model, other.optimizer)
    dcp.load(wanted, checkpoint_id=str(tmp_path / "dcp"))
    set_optimizer_state_dict(other.model, other.optimizer, wanted)
    other.train(2, first=2)


@pytest.mark.parametrize("case", BUILDERS)
@pytest.mark.parametrize("api", ["fsdp1", "fully_shard"])
@distributed(world_size=3)
def test_fsdp_c_checkpoint(tmp_path: Path, api: str, case: str) -> None:
    """Saved and loaded by fsdp_c, in the other API, too."""
    run = BUILDERS[case](api)
    run.train(2)
    checkpoint.save(tmp_path / "c", run.model, run.optimizer)
    for other_api in ("fsdp1", "fully_shard"):
        other = BUILDERS[case](other_api)
        copy_values(run, other)
        checkpoint.load(tmp_path / "c", other.model, other.optimizer)
        other.train(2, first=2)
