"""fully_shard with float8 weights: a subclass without memory of its own.

As torchao's, which tests/integrations/test_torchao.py runs where it is installed.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree

from fsdp_c import FSDP, checkpoint, fully_shard, trace
from fsdp_c.checkpoint._memory import bytes_of
from helpers.distributed import distributed
from helpers.groups import device_under_test, groups_destroyed, kept_mesh
from helpers.seeds import generator

ROWS, COLUMNS = 8, 6
LARGEST = torch.finfo(torch.float8_e4m3fn).max

aten: Any = torch.ops.aten
# FSDP shards the weight and the result must be one.
_KEPT = {
    getattr(aten, name).default
    for name in ("detach", "clone", "view", "empty_like", "copy_", "as_strided")
} | {
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.new_zeros.default,
    aten._to_copy.default,
}


class Float8Weight(Tensor):
    """An fp32 weight of which ranks send float8, with one scale for all of them."""

    def __new__(cls, master: Tensor) -> "Float8Weight":
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            master.shape,
            strides=master.stride(),
            dtype=master.dtype,
            device=master.device,
            requires_grad=master.requires_grad,
        )

    def __init__(self, master: Tensor) -> None:
        self.master = master

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        plain = _pytree.tree_map_only(cls, lambda x: x.master, (args, kwargs or {}))
        result = function(*plain[0], **plain[1])
        if function not in _KEPT:
            return result
        return _pytree.tree_map_only(Tensor, cls, result)

    def __tensor_flatten__(self) -> Any:
        return ["master"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Any, context: Any, size: Any, stride: Any
    ) -> Any:
        return cls(inner["master"])

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        """Scale by the largest element of all ranks."""
        amax = self.master.detach().abs().amax()
        dist.all_reduce(amax, dist.ReduceOp.MAX, mesh.get_group())
        scale = LARGEST / amax
        return ((self.master * scale).to(torch.float8_e4m3fn),), scale

    def fsdp_post_all_gather(
        self, outputs: Any, scale: Tensor, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Give modules the fp32 values of what came."""
        (sent,) = outputs
        assert sent.dtype == torch.float8_e4m3fn
        whole = sent.to(dtype) / scale
        if out is not None:
            out.copy_(whole)
            return None
        return whole, (whole,)


class _WithoutViews(Float8Weight):
    """As NF4Tensor of torchao 0.9."""

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        if function is aten.view.default:
            raise NotImplementedError("aten.view")
        return super().__torch_dispatch__(function, types, args, kwargs)


class _Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(COLUMNS, ROWS)
        self.weight = nn.Parameter(Float8Weight(self.weight.detach()))


def _make_model(mesh: DeviceMesh | None = None) -> Any:
    # Named, because torch remembers meshes of other tests, whose groups are gone.
    mesh = mesh or kept_mesh((dist.get_world_size(),), ("float8",))
    torch.manual_seed(0)
    model = nn.Sequential(_Linear(), nn.Linear(ROWS, 3))
    for module in model:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _master(model: Any) -> Tensor:
    weight: Tensor = model[0].weight.detach().full_tensor()
    return weight


def _train(model: Any, num_steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(num_steps):
        model(torch.randn(4, COLUMNS, generator=generator(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@distributed(world_size=(2, 4))
def test_training_sends_one_byte_per_element() -> None:
    """Forward and the gradient are those of the rounded weight."""
    model = _make_model()
    for step in range(3):
        x = torch.randn(4, COLUMNS, generator=generator(step))
        master = _master(model)
        scale = LARGEST / master.abs().amax()
        rounded = (master * scale).to(torch.float8_e4m3fn).float() / scale
        rounded.requires_grad_()
        others = {name: p.full_tensor() for name, p in model.named_parameters()}
        hidden = nn.functional.linear(x, rounded, others["0.bias"])
        expected = nn.functional.linear(hidden, others["1.weight"], others["1.bias"])
        expected.square().sum().backward()
        with trace.record(model, steps=1) as timeline:
            output = model(x)
            output.square().sum().backward()
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(model[0].weight.grad.full_tensor(), rounded.grad)
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(0.01 * param.grad)
        model.zero_grad()
    gathered = {
        (span.unit, span.nbytes)
        for span in timeline.recorded.spans
        if span.kind == "all_gather"
    }
    names = [unit.name for unit in timeline.recorded.units]
    assert (names.index("0"), ROWS * COLUMNS + 4 * ROWS) in gathered


@distributed(world_size=2)
def test_full_state_dict() -> None:
    """Full ones have plain tensors of the fp32 values, and load again."""
    model = _make_model()
    _train(model)
    expected = _master(model)
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(model, options=options)
    assert type(full["0.weight"]) is Tensor
    assert torch.equal(full["0.weight"], expected)
    other = _make_model()
    set_model_state_dict(other, full, options=options)
    assert isinstance(other[0].weight.to_local(), Float8Weight)
    assert torch.equal(_master(other), expected)
    x = torch.ones(2, COLUMNS)
    assert torch.equal(other(x), model(x))


@distributed(world_size=4)
def test_checkpoint(rank: int, tmp_path: Path) -> None:
    """What two ranks save, four load."""
    with groups_destroyed():
        mesh = DeviceMesh(device_under_test(), [0, 1], mesh_dim_names=("two",))
        expected = [torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)]
        if rank < 2:
            model = _make_model(mesh)
            optimizer = _train(model)
            moment = optimizer.state[model[0].weight]["exp_avg"]
            expected = [_master(model), moment.full_tensor()]
            checkpoint.save(
                tmp_path / "c", model, optimizer, process_group=mesh.get_group()
            )
        for tensor in expected:
            dist.broadcast(tensor, 0)
        dist.barrier()  # on a device the host does not wait for a broadcast
        model = _make_model()
        optimizer = _train(model, 1)
        model(torch.ones(2, COLUMNS))
        checkpoint.load(tmp_path / "c", model, optimizer)
        assert isinstance(model[0].weight.to_local(), Float8Weight)
        moment = optimizer.state[model[0].weight]["exp_avg"]
        assert torch.equal(_master(model), expected[0])
        assert torch.equal(moment.full_tensor(), expected[1])


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_other_api_refuses(use_orig_params: bool) -> None:
    """A flat parameter has one dtype; the error names the API that works."""
    with pytest.raises(ValueError, match=r"0.weight' is a Float8Weight.*fully_shard"):
        FSDP(nn.Sequential(_Linear()), use_orig_params=use_orig_params)


def test_no_bytes_of_a_subclass() -> None:
    """An error, where the address would be 0."""
    with pytest.raises(ValueError, match="a Float8Weight has no memory of its own"):
        bytes_of(Float8Weight(torch.ones(2, 2)))


@distributed(world_size=2)
def test_a_class_without_views() -> None:
    """Frozen, as under adapters."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, ROWS))
    weight = torch.eye(ROWS, COLUMNS)
    model[1].weight = nn.Parameter(_WithoutViews(weight), requires_grad=False)
    for module in (*model, model):
        fully_shard(module)
    inputs = torch.randn(2, COLUMNS)
    output = model(inputs)
    hidden = nn.functional.linear(
        inputs, model[0].weight.full_tensor(), model[0].bias.full_tensor()
    )
    bias = model[1].bias.full_tensor()
    torch.testing.assert_close(output, hidden @ weight.T + bias)
    output.sum().backward()
    assert model[0].weight.grad is not None
