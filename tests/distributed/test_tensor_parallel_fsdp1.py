"""FullyShardedDataParallel over parameters that are DTensors of a tensor mesh."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.tensor import DTensor

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint
from helpers.distributed import distributed, varied
from helpers.groups import groups_destroyed
from helpers.models import VOCAB
from helpers.reference import objects_of_all_ranks
from helpers.rows import shard_by
from helpers.seeds import seeded
from helpers.shared_folder import shared_folder
from helpers.state_dicts import whole_state
from helpers.tensor_parallel import (
    ParallelBlock,
    ParallelModel,
    make,
    make_both,
    parallelize,
    shared_step,
    tokens,
    train_and_check,
    two_meshes,
)


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare state dicts by their whole tensors."""
    torch.testing.assert_close(whole_state(actual), whole_state(expected))


@pytest.mark.bookkeeping
@pytest.mark.parametrize("api", ["FSDP", "FSDP flat"])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@distributed(world_size=4)
def test_state_dicts(api: str, kind: str) -> None:
    """DTensors on the tensor parallel mesh, or on the mesh of both, and back."""
    with groups_destroyed():
        torch.manual_seed(0)
        reference = ParallelModel(hidden=7)
        model = make(api, 2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        FSDP.set_state_dict_type(model, StateDictType[kind])
        state = model.state_dict()
        for name, param in reference.named_parameters():
            value = state[name]
            assert isinstance(value, DTensor)
            assert value.device_mesh.ndim == (1 if kind.startswith("FULL") else 2)
            assert torch.equal(value.full_tensor(), param), name
        shared_step(model, optimizer, seed=0)
        state = copy.deepcopy(model.state_dict())
        optim_state = copy.deepcopy(FSDP.optim_state_dict(model, optimizer))
        moment = optim_state["state"]["blocks.0.up.weight"]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert moment.shape == reference.blocks[0].up.weight.shape
        loss = shared_step(model, optimizer, seed=1)
        after = whole_state(model.state_dict())
        other = make(api, 2, 2, seed=1)
        FSDP.set_state_dict_type(other, StateDictType[kind])
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
        # The meshes differ in their names only.
        names = dict(zip(state, other.state_dict().values(), strict=True))
        other.load_state_dict({n: moved(v, names[n]) for n, v in state.items()})
        moved_states = {
            name: {
                key: moved(value, names[name]) if isinstance(value, DTensor) else value
                for key, value in each.items()
            }
            for name, each in optim_state["state"].items()
        }
        loaded = FSDP.optim_state_dict_to_load(
            other, other_optimizer, {**optim_state, "state": moved_states}
        )
        other_optimizer.load_state_dict(loaded)
        torch.testing.assert_close(shared_step(other, other_optimizer, seed=1), loss)
        assert_equal(other.state_dict(), after)
        if kind.startswith("FULL"):  # plain tensors of the whole
            other.load_state_dict(reference.state_dict())
            assert_equal(other.state_dict(), reference.state_dict())


def moved(value: Any, like: Any) -> Any:
    """Return ``value`` on the mesh of ``like``."""
    assert value.placements == like.placements
    return DTensor.from_local(
        value.to_local(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def made(kind: str, *shape: int, **options: Any) -> Any:
    """Return a model of an API, or a replicated one."""
    if kind == "NO_SHARD":
        return make("FSDP", *shape, strategy=kind, **options)
    return make(kind, *shape, **options)


@pytest.mark.bookkeeping
@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("FSDP flat", "NO_SHARD"),
        ("FSDP", "fully_shard"),
        ("fully_shard", "FSDP flat"),
        ("NO_SHARD", "FSDP"),
        ("FSDP flat", "FSDP"),
        ("FSDP flat", "fully_shard"),
        ("FSDP", "FSDP flat"),
        ("fully_shard", "FSDP"),
    ],
)
@distributed(world_size=4)
def test_own_checkpoint_at_another_shape(
    saved: str, loaded: str, shape: tuple[int, int]
) -> None:
    """fsdp_c.checkpoint at other shapes and of the other API, optimizer included."""
    with groups_destroyed(), shared_folder() as folder:
        model = made(saved, 2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        shared_step(model, optimizer, seed=0)
        path = Path(folder) / "checkpoint"
        checkpoint.save(path, model, optimizer)
        expected = whole_state(get_model_state_dict(model))
        loss = shared_step(model, optimizer, seed=1)
        other = made(loaded, *shape, seed=1)
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
        if loaded != "FSDP flat":  # memory of a state that goes
            shared_step(other, optimizer, seed=3)
        checkpoint.load(path, other, optimizer)
        assert_equal(get_model_state_dict(other), expected)
        torch.testing.assert_close(shared_step(other, optimizer, seed=1), loss)


class _WithEmpty(ParallelModel):
    """A parameter without elements, and one of which some ranks hold none."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = super().forward(tokens)
        return out * self.gain + self.empty.sum()


@pytest.mark.bookkeeping
@pytest.mark.parametrize("api", ["FSDP", "FSDP flat"])
@pytest.mark.parametrize("num_dp", [1, 2])
@distributed(world_size=4)
def test_own_checkpoint_with_an_empty_parameter(api: str, num_dp: int) -> None:
    """A fresh optimizer gets the state of parameters without elements, too."""

    def build(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        dp, tp = two_meshes(num_dp, 4 // num_dp)
        model = shard_by(api, parallelize(_WithEmpty(), tp), {ParallelBlock}, mesh=dp)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def states_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        full = StateDictOptions(full_state_dict=True)
        states = get_optimizer_state_dict(model, optimizer, options=full)["state"]
        return {f"{n} {k}": v for n, state in states.items() for k, v in state.items()}

    with groups_destroyed(), shared_folder() as folder:
        model, optimizer = build(0)
        shared_step(model, optimizer, seed=0)
        path = Path(folder) / "checkpoint"
        checkpoint.save(path, model, optimizer)
        other, its_optimizer = build(1)
        checkpoint.load(path, other, its_optimizer)
        expected = states_of(model, optimizer)
        assert expected["empty exp_avg"].shape == (0, 3)
        assert_equal(states_of(other, its_optimizer), expected)
        loss = shared_step(model, optimizer, seed=1)
        torch.testing.assert_close(shared_step(other, its_optimizer, seed=1), loss)
        del model, other


@distributed(world_size=4)
def test_summon_apply_and_sync(rank: int, world_size: int) -> None:
    """Writes through DTensors are kept; rank 0's values reach its group."""
    with groups_destroyed():
        model = make("FSDP", 2, 2, sync_module_states=True, seed=rank)
        with FSDP.summon_full_params(model):
            whole = {n: p.to_local().clone() for n, p in model.named_parameters()}
            gathered = objects_of_all_ranks(whole)
            for name, value in whole.items():
                assert torch.equal(value, gathered[rank % 2][name])
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(2.0)
        model.apply(lambda m: m.reset() if hasattr(m, "reset") else None)
        for value in model.state_dict().values():
            assert torch.equal(value.full_tensor(), torch.full(value.shape, 2.0))
        model.blocks[0].up.weight = nn.Parameter(torch.zeros(3))
        with pytest.raises(RuntimeError, match="Cannot writeback"):
            model(*tokens(seeded(0)))


@varied(
    api=["FSDP", "FSDP flat"],
    strategy=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"],
    how=["none", "other", "in place"],
)
@distributed(world_size=4)
def test_gradients_set_in_a_summon(api: str, strategy: str, how: str) -> None:
    """They are kept, as those of plain parameters are."""
    with groups_destroyed():
        both = make_both(api, 2, 2, strategy=strategy)
        both.forward_backward()
        with FSDP.summon_full_params(both.model, with_grads=True):
            for param in both.model.parameters():
                if how == "none":
                    param.grad = None
                elif how == "other":
                    param.grad = param.grad * 0.5
                else:
                    param.grad.mul_(0.5)
        for param in both.reference.parameters():
            param.grad = None if how == "none" else param.grad * 0.5
        both.check()
        both.forward_backward()
        both.checked_step()
        del both, param


@varied(
    api=["FSDP", "FSDP flat"],
    strategy=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"],
    quiet=[True, False],
)
@distributed(world_size=4)
def test_summon_while_gradients_accumulate(
    api: str, strategy: str, quiet: bool
) -> None:
    """Those that are not reduced are of reduce_dtype; sharded ones are not shown."""
    with groups_destroyed():
        precision = MixedPrecision(reduce_dtype=torch.float32)
        both = make_both(api, 2, 2, strategy=strategy, mixed_precision=precision)
        both.tolerance = 1e-4
        with both.model.no_sync() if quiet else nullcontext():
            both.forward_backward()
        with FSDP.summon_full_params(both.model):
            for param in both.model.parameters():
                grad = param.grad
                assert grad is None or grad.to_local().shape == param.to_local().shape
                with torch.no_grad():
                    param.mul_(0.9)
        with torch.no_grad():
            for param in both.reference.parameters():
                param.mul_(0.9)
        both.forward_backward()
        both.checked_step()
        del both, param, grad


class _Recurrent(nn.LSTM):
    """A residual layer; nn.LSTM keeps lists of what is set on it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)[0]


class _Listener(nn.Linear):
    """Counts what is set on it."""

    num_set = 0

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["num_set"] = self.num_set + 1
        super().__setattr__(name, value)


class _WithListeners(ParallelModel):
    """One of them is cut, the other is not."""

    def __init__(self) -> None:
        super().__init__(dim := 6)
        self.blocks.append(_Recurrent(dim, dim))
        self.head = _Listener(dim, VOCAB - 1, bias=False)


@varied(api=["FSDP", "FSDP flat"], strategy=["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=4)
def test_modules_with_a_setattr_of_their_own(api: str, strategy: str) -> None:
    """Parameters are set on them in each forward, as without tensor parallelism."""
    with groups_destroyed():
        both = make_both(api, 2, 2, build=_WithListeners, strategy=strategy)
        train_and_check(both)
        before = both.model.head.num_set
        both.train(1)
        assert both.model.head.num_set > before
        del both


@distributed(world_size=2)
def test_refusals() -> None:
    """A copy, and a mesh of another mesh."""
    with groups_destroyed():
        model = make("FSDP flat", 1, 2)
        with pytest.raises(RuntimeError, match="cannot be copied"):
            copy.deepcopy(model)
        _, tp = two_meshes(1, 2)
        dp, _ = two_meshes(2, 1)
        with pytest.raises(ValueError, match="device_mesh=mesh"):
            FSDP(parallelize(ParallelModel(), tp))
        with pytest.raises(ValueError, match="not a part of the same mesh"):
            FSDP(parallelize(ParallelModel(), tp), device_mesh=dp)
