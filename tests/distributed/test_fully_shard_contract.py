"""What other tests of ``fully_shard`` do not hold: refusals, settings, arguments."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
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

Refusal = tuple[type[Exception], str, Any, dict[str, Any]]


@distributed(world_size=2)
def test_refused_arguments() -> None:
    """With the words that name the argument; nothing is sharded."""
    linear = nn.Linear(4, 4)
    wrapped = nn.Sequential(fsdp_c.FSDP(nn.Linear(2, 2)))
    with groups_destroyed():
        three = init_device_mesh(TEST_DEVICE, (2, 1, 1), mesh_dim_names=("a", "b", "c"))
        unnamed = init_device_mesh(TEST_DEVICE, (2, 1))
        cases: list[Refusal] = [
            (ValueError, "got an empty list", [], {}),
            (ValueError, "use one of the two APIs in a module tree", wrapped, {}),
            (ValueError, "bool or an int", linear, {"reshard_after_forward": "no"}),
            (
                ValueError,
                "should be a factor of 2",
                linear,
                {"reshard_after_forward": 0},
            ),
            (TypeError, "offload_policy must be", linear, {"offload_policy": True}),
            (ValueError, "expects a 1D or 2D DeviceMesh", linear, {"mesh": three}),
            (AssertionError, "init the 2D mesh for HSDP", linear, {"mesh": unnamed}),
        ]
        for error, message, module, options in cases:
            with pytest.raises(error, match=message):
                fully_shard(module, **options)
    assert type(linear) is nn.Linear
    assert not any(isinstance(p, DTensor) for p in linear.parameters())


@distributed(world_size=2)
def test_refusals() -> None:
    """What is not supported is named."""
    linear = nn.Linear(4, 4)
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    cases: list[Refusal] = [
        (ValueError, "scalar parameters", scalar, {}),
        (ValueError, "containers", nn.ModuleList([linear]), {}),
        (TypeError, "dp_mesh_dims", linear, {"dp_mesh_dims": object()}),
        (ValueError, "should be a factor of 2", linear, {"reshard_after_forward": 3}),
        (TypeError, "mesh", linear, {"mesh": 3}),
        (TypeError, "mp_policy", linear, {"mp_policy": None}),
        (
            AssertionError,
            "Shard dim 1 is invalid for 1D tensor: .*'bias'",
            linear,
            {"shard_placement_fn": lambda p: Shard(1)},
        ),
        (TypeError, "takes modules", [3], {}),
    ]
    for error, message, module, options in cases:
        with pytest.raises(error, match=message):
            fully_shard(module, **options)
    assert type(linear) is nn.Linear
    sharded: Any = fully_shard(linear, offload_policy=CPUOffloadPolicy())
    with pytest.raises(AssertionError, match="only be applied to a module once"):
        fully_shard(sharded)
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(sharded)
    sharded(torch.randn(2, 4)).sum().backward()
    dist.barrier()


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
    with pytest.raises(AssertionError, match="No FSDP state found"):
        model._get_fsdp_state()
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


class Casts(nn.Module):
    """Notes the dtypes that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [x.dtype, self.fc.weight.dtype]
        out: Tensor = self.fc(x.to(self.fc.weight.dtype))
        return out


@pytest.mark.parametrize("casts", [True, False])
@distributed(world_size=2)
def test_casts_of_inputs(casts: bool) -> None:
    """cast_forward_inputs, with the other fields of the policy."""
    model = Casts()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float64,
        cast_forward_inputs=casts,
    )
    fully_shard(model, mp_policy=policy)
    out = model(torch.ones(2, 4))
    out.sum().backward()
    expected = torch.bfloat16 if casts else torch.float32
    assert model.seen == [expected, torch.bfloat16]
    assert out.dtype == torch.float64
    assert model.fc.weight.grad is not None
    assert model.fc.weight.grad.dtype == torch.float32


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
