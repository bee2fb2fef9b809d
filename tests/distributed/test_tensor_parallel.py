"""Training over a tensor parallel mesh, in both APIs; what fully_shard holds there.

Of FullyShardedDataParallel: test_tensor_parallel_fsdp1.py.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
)

from fsdp_c import fully_shard
from helpers.distributed import distributed
from helpers.groups import device_under_test, groups_destroyed
from helpers.rows import APIS, shard_units, whole_of
from helpers.seeds import seeded
from helpers.shared_folder import shared_folder
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
    whole_value,
)

NIGHT = pytest.mark.only_full


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def check_training(
    api: str,
    num_dp: int,
    num_tp: int,
    hidden: int,
    *,
    strategy: str = "FULL_SHARD",
    num_replicas: int | None = None,
) -> None:
    """Train a model over the mesh and the unsharded one."""
    with groups_destroyed():
        both = make_both(
            api,
            num_dp,
            num_tp,
            num_replicas=num_replicas,
            build=functools.partial(ParallelModel, hidden=hidden),
            optimizer=adamw,
            strategy=strategy,
            keeps_root=True,
        )
        train_and_check(both)
        if api != "fully_shard":  # torch finds no largest element of an empty part
            both.clip(0.01, float("inf"))


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("hidden", [10, 7])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=4)
def test_training(api: str, hidden: int, strategy: str) -> None:
    """2 x 2, with parts of equal and of different sizes."""
    check_training(api, 2, 2, hidden, strategy=strategy)


@pytest.mark.bookkeeping
@pytest.mark.parametrize(
    "api", ["FSDP", pytest.param("FSDP flat", marks=NIGHT), "fully_shard"]
)
@distributed(world_size=2)
def test_one_rank_in_a_dimension(api: str) -> None:
    """1 x 2 and 2 x 1."""
    check_training(api, 1, 2, 7)
    check_training(api, 2, 1, 7)


@pytest.mark.bookkeeping
@distributed(world_size=3)
def test_more_ranks_than_parts() -> None:
    """A rank of the tensor parallel group that has nothing of some parameters."""
    check_training("fully_shard", 1, 3, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@distributed(world_size=3)
def test_a_unit_without_elements(rank: int, dtype: torch.dtype) -> None:
    """A rank that has nothing of a unit has gradients and takes part in norms."""
    with groups_destroyed():
        dp, tp = two_meshes(1, 3)
        model: Any = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        style = ColwiseParallel(output_layouts=Replicate())
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        fully_shard(parallelize_module(model, tp, style), mesh=dp, mp_policy=policy)
        for _ in range(2):
            output = model(torch.ones(2, 4, dtype=torch.float64))
            assert output.dtype == dtype
            output.sum().backward()
        assert model.weight.grad.to_local().numel() == (8, 8, 0)[rank]
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.full_tensor().item() == pytest.approx(16.0)


@pytest.mark.cpu_only("it compares with values on the CPU")
@distributed(world_size=4)
def test_what_a_rank_holds() -> None:
    """The tensor parallel cut first, then torch.chunk of its local tensor."""
    with groups_destroyed():
        dp, tp = two_meshes(2, 2)
        model = ParallelModel(hidden=7)
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        parallelize(model, tp)
        local = {n: p.to_local().clone() for n, p in model.named_parameters()}
        sharded = shard_units(model, {ParallelBlock}, mesh=dp)
        seen: list[Any] = []
        up = sharded.blocks[0].up
        up.register_forward_pre_hook(lambda m, _: seen.append(m.weight))
        sharded(*tokens(seeded(0))).sum().backward()
        assert isinstance(seen[0], nn.Parameter)
        assert seen[0].placements == (Shard(0),)
        assert seen[0].device_mesh == tp
        for name, param in sharded.named_parameters():
            assert param.device_mesh.mesh_dim_names == (
                *dp.mesh_dim_names,
                *tp.mesh_dim_names,
            )
            assert param.shape == param.grad.shape == whole[name].shape
            parts = local[name].chunk(2)
            mine = parts[dp.get_local_rank()] if len(parts) > dp.get_local_rank() else 0
            if isinstance(mine, Tensor):
                assert torch.equal(param.to_local(), mine), name
            assert torch.equal(param.full_tensor(), whole[name]), name
            (grad,) = whole_of([param.grad])
            assert torch.allclose(param.grad.full_tensor(), grad), name
        assert sharded.head.weight.placements[1] == Shard(0)
        assert sharded.blocks[0].down.weight.placements == (Shard(0), Shard(1))
        assert sharded.blocks[0].norm.weight.placements == (Shard(0), Replicate())


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=4)
def test_replicas(api: str) -> None:
    """(replicate, shard, tp) = (2, 1, 2): the third dimension is tensor parallel."""
    check_training(api, 1, 2, 10, strategy="HYBRID_SHARD", num_replicas=2)


@distributed(world_size=4)
def test_mixed_precision_and_frozen() -> None:
    """Modules see DTensors of param_dtype; frozen ones get no gradient."""
    with groups_destroyed():
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = make("fully_shard", 2, 2, mp_policy=policy)
        model.head.weight.requires_grad_(False)
        seen: list[Any] = []
        block = model.blocks[0]
        block.up.register_forward_pre_hook(
            lambda m, _: seen.extend((m.weight.dtype, m.weight.to_local().dtype))
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = [shared_step(model, optimizer, seed=0) for _ in range(3)]
        assert losses[2] < losses[0]
        assert seen[:2] == [torch.bfloat16] * 2
        assert block.up.weight.dtype == block.up.weight.grad.dtype == torch.float32
        assert model.head.weight.grad is None
        model.head.weight.requires_grad_(True)
        shared_step(model, optimizer, seed=0)
        assert isinstance(model.head.weight.grad, DTensor)


@pytest.mark.bookkeeping
@distributed(world_size=4)
def test_meta_construction_and_conversion(rank: int) -> None:
    """Materialized after sharding, then converted and trained."""
    with groups_destroyed():
        dp, tp = two_meshes(2, 2)
        with torch.device("meta"):
            model: Any = parallelize(ParallelModel(hidden=8), tp)
        shard_units(model, {ParallelBlock}, mesh=dp)
        model.to_empty(device=device_under_test())
        full = ParallelModel(hidden=8).state_dict()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, full if rank == 0 else {}, options=options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        first = shared_step(model, optimizer, seed=0)
        model.double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        assert shared_step(model, optimizer, seed=0).dtype == torch.float64
        assert shared_step(model, optimizer, seed=0) < first
        assert model.head.weight.dtype == model.head.weight.grad.dtype == torch.float64


@pytest.mark.bookkeeping
@pytest.mark.parametrize(
    ("api", "hidden"),
    [
        ("FSDP", 8),
        pytest.param("FSDP flat", 8, marks=NIGHT),
        pytest.param("fully_shard", 8, marks=NIGHT),
        ("fully_shard", 7),
    ],
)
@distributed(world_size=4)
def test_checkpoint_at_another_shape(api: str, hidden: int) -> None:
    """Saved at 2 x 2, loaded at 1 x 4 and 4 x 1, optimizer included."""
    with groups_destroyed(), shared_folder() as folder:
        model = make(api, 2, 2, hidden=hidden)
        optimizer = adamw(model.parameters())
        for seed in range(2):
            shared_step(model, optimizer, seed)
        state, optim_state = get_state_dict(model, optimizer)
        path = Path(folder) / "checkpoint"
        dcp.save({"model": state, "optim": optim_state}, checkpoint_id=path)
        full = StateDictOptions(full_state_dict=True)
        expected = get_model_state_dict(model, options=full)
        loss = shared_step(model, optimizer, seed=2)
        for shape in ((1, 4), (4, 1)):
            other = make(api, *shape, hidden=hidden, seed=1)
            optimizer = adamw(other.parameters())
            state, optim_state = get_state_dict(other, optimizer)
            loaded = {"model": state, "optim": optim_state}
            dcp.load(loaded, checkpoint_id=path)
            set_state_dict(
                other,
                optimizer,
                model_state_dict=loaded["model"],
                optim_state_dict=loaded["optim"],
            )
            for name, value in get_model_state_dict(other, options=full).items():
                assert torch.equal(whole_value(value), whole_value(expected[name]))
            torch.testing.assert_close(shared_step(other, optimizer, seed=2), loss)


@pytest.mark.bookkeeping
@pytest.mark.parametrize("broadcast", [False, True])
@distributed(world_size=4)
def test_full_state_of_uneven_parts(rank: int, broadcast: bool) -> None:
    """13 rows over 2 x 2 ranks: torch's own fails, or puts rows in wrong places."""
    with groups_destroyed():
        model = make("fully_shard", 2, 2, hidden=13)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        shared_step(model, optimizer, seed=0)
        full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        state, optim_state = get_state_dict(model, optimizer, options=full)
        has_it = rank == 0 or not broadcast
        loss = shared_step(model, optimizer, seed=1)
        other = make("fully_shard", 2, 2, hidden=13, seed=1)
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
        given = (dict(state), optim_state) if has_it else ({}, {})
        set_model_state_dict(other, given[0], options=full)
        set_optimizer_state_dict(other, optimizer, given[1], options=full)
        for name, value in get_model_state_dict(other, options=full).items():
            assert torch.equal(value, state[name]), name
        torch.testing.assert_close(shared_step(other, optimizer, seed=1), loss)


@distributed(world_size=2)
def test_refusals() -> None:
    """A mesh of another mesh, and a Partial parameter."""
    with groups_destroyed():
        dp, tp = two_meshes(1, 2)
        other, _ = two_meshes(2, 1)
        module = nn.Linear(4, 4)
        parallelize_module(module, tp, ColwiseParallel())
        with pytest.raises(ValueError, match="not a part of the same mesh"):
            fully_shard(module, mesh=other)
        partial = nn.Module()
        value = DTensor.from_local(torch.ones(2), tp, [Partial()])
        partial.weight = nn.Parameter(value)
        with pytest.raises(ValueError, match="cannot be Partial"):
            fully_shard(partial, mesh=dp)
        scalar = nn.Module()
        scalar.scale = nn.Parameter(
            distribute_tensor(torch.tensor(1.0), tp, [Replicate()])
        )
        with pytest.raises(ValueError, match="scalar parameters"):
            fully_shard(scalar, mesh=dp)
