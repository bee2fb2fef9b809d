"""What other tests of ``fully_shard`` do not hold: refusals, settings, arguments."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from torch.distributed.tensor import DTensor, Shard

import fsdp_c
from fsdp_c import (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import groups_destroyed
from helpers.rows import Rows


@distributed(world_size=2)
def test_refused_arguments() -> None:
    """With the words that name the argument; nothing is sharded."""
    linear = nn.Linear(4, 4)
    wrapped = nn.Sequential(fsdp_c.FSDP(nn.Linear(2, 2)))
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with groups_destroyed():
        three = init_device_mesh(TEST_DEVICE, (2, 1, 1), mesh_dim_names=("a", "b", "c"))
        unnamed = init_device_mesh(TEST_DEVICE, (2, 1))
        of_modules: list[tuple[type[Exception], str, Any]] = [
            (ValueError, "got an empty list", []),
            (ValueError, "use one of the two APIs in a module tree", wrapped),
            (ValueError, "scalar parameters", scalar),
            (ValueError, "containers", nn.ModuleList([linear])),
            (TypeError, "takes modules", [3]),
        ]
        for error, message, module in of_modules:
            with pytest.raises(error, match=message):
                fully_shard(module)
        of_options: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (ValueError, "bool or an int", {"reshard_after_forward": "no"}),
            (ValueError, "should be a factor of 2", {"reshard_after_forward": 0}),
            (ValueError, "should be a factor of 2", {"reshard_after_forward": 3}),
            (TypeError, "offload_policy must be", {"offload_policy": True}),
            (ValueError, "expects a 1D or 2D DeviceMesh", {"mesh": three}),
            (AssertionError, "init the 2D mesh for HSDP", {"mesh": unnamed}),
            (TypeError, "mesh", {"mesh": 3}),
            (TypeError, "dp_mesh_dims", {"dp_mesh_dims": object()}),
            (TypeError, "mp_policy", {"mp_policy": None}),
            (
                AssertionError,
                "Shard dim 1 is invalid for 1D tensor: .*'bias'",
                {"shard_placement_fn": lambda p: Shard(1)},
            ),
        ]
        for error, message, options in of_options:
            with pytest.raises(error, match=message):
                fully_shard(linear, **options)
    assert type(linear) is nn.Linear
    assert not any(isinstance(p, DTensor) for p in linear.parameters())
    sharded: Any = fully_shard(linear, offload_policy=CPUOffloadPolicy())
    with pytest.raises(AssertionError, match="only be applied to a module once"):
        fully_shard(sharded)
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(sharded)
    sharded(torch.randn(2, 4)).sum().backward()


def test_nothing_of_torchs_runtime_is_inherited() -> None:
    """Every function of torch's class has one of ours before it."""
    functions = {n for n, f in vars(TorchFSDPModule).items() if callable(f)}
    assert functions - set(vars(FSDPModule)) == set()


def test_no_process_group() -> None:
    with pytest.raises(ValueError, match="there is no default process group"):
        fully_shard(nn.Linear(2, 2))


@distributed(world_size=2)
def test_refused_calls() -> None:
    """Methods with wrong values, or at the wrong moment; training goes on."""
    model: Any = fully_shard(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="does not have a method generate"):
        register_fsdp_forward_method(model, "generate")
    with pytest.raises(ValueError, match="reshard_after_forward should be a bool, got"):
        model.set_reshard_after_forward(2)
    for method in ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"):
        for factor in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="factor must be > 0"):
                getattr(model, method)(factor)
    state = model._get_fsdp_state()
    with pytest.raises(AttributeError, match="'_lazy_init' belongs to torch's FSDPSta"):
        state._lazy_init()
    with pytest.raises(AttributeError):
        state._training_state = None
    moved = model.register_forward_pre_hook(lambda module, _: module.double())
    with pytest.raises(RuntimeError, match="be converted or moved in the middle"):
        model(torch.ones(1, 4))
    moved.remove()
    model.reset_iter_state()
    model(torch.ones(1, 4)).sum().backward()
    with torch.device("meta"):
        empty = fully_shard(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"still on meta device: \['weight', 'bias'"):
        empty(torch.ones(1, 4))


@distributed(world_size=2)
def test_settings_without_effect(world_size: int) -> None:
    """They are there, and change nothing."""
    both = Rows.of("mlp")
    model: Any = both.model
    model.set_force_sum_reduction_for_comms(True)
    model.set_keep_unsharded_storage(True)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group()
    model._set_unshard_async_op(True)
    share_comm_ctx([m for m in model.modules() if isinstance(m, FSDPModule)])
    both.train(1)
    model.set_post_optim_event(torch.Event(torch.device(TEST_DEVICE)))
    both.train(1)
    model.set_reduce_scatter_divide_factor(world_size)
    both.train(1)


@distributed(world_size=2)
def test_ignored_and_classes() -> None:
    """Ignored parameters stay plain; classes are torch's and ours."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    ignored = model[0].weight
    fully_shard(model, ignored_params={ignored})
    assert model[0].weight is ignored
    assert type(model[0].weight) is nn.Parameter
    assert isinstance(model[0].bias, DTensor)
    assert isinstance(model, FSDPModule)
    assert isinstance(model, TorchFSDPModule)
    assert isinstance(model, nn.Sequential)
    assert type(model[1:]) is nn.Sequential  # a slice is not sharded
    handle = model.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    assert isinstance(handle, TorchUnshardHandle)
    handle.wait()
    handle.wait()  # does nothing
    model(torch.ones(2, 4)).sum().backward()
    assert ignored.grad is not None
    assert not isinstance(ignored.grad, DTensor)


@pytest.mark.parametrize("of_fsdp", [False, True])
@distributed(world_size=2, device="cpu")
def test_replicated_modules_inside(rank: int, of_fsdp: bool) -> None:
    """What torch's replicate() replicates stays whole; its gradients are averaged once.

    Both of torch: DDP's, and that of FSDP2 if this version has it.
    """
    replicate: Any = torch.distributed._composable.replicate
    if of_fsdp:
        pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
        replicate = torch.distributed._composable.replicate_with_fsdp.replicate
    torch.manual_seed(0)
    reference = nn.Sequential(
        nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 6)), nn.Linear(6, 3)
    ).double()
    model = copy.deepcopy(reference)
    replicate(model[1])
    fully_shard(model[2])
    fully_shard(model)
    assert dict(model[0].named_parameters())["weight"].placements == (Shard(0),)
    for param in model[1].parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        assert local.shape == param.shape
    for step in range(2):
        batches = torch.randn(2, 7, 4, dtype=torch.float64)
        model(batches[rank]).square().mean().backward()
        sum(reference(each).square().mean() / 2 for each in batches).backward()
        for (name, param), expected in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            grad = param.grad
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            torch.testing.assert_close(whole, expected.grad, msg=f"{step} {name}")
