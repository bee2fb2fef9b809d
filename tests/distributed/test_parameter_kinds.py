"""Parameters that cannot be flattened are refused by name before anything changes."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map

from helpers.distributed import distributed, varied
from helpers.impl import fsdp
from helpers.models import DIM, MLP, Block
from helpers.reference import Differential, with_model
from helpers.rows import APIS, shard_by

pytestmark = pytest.mark.cpu_only("quantized and nested tensors are made on the host")


class _Wrapper(Tensor):
    """Holds another tensor and has no memory, as torchao's weights."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "_Wrapper":
        wrapper: _Wrapper = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, _Wrapper) else value

        def wrap(value: Any) -> Any:
            return _Wrapper(value) if isinstance(value, Tensor) else value

        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(wrap, out)


class _Scaled(Tensor):
    """Has a dispatch of its own, over memory of its own."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func in (torch.ops.aten.detach.default, torch.ops.aten.new_empty.default):
            return out.as_subclass(cls)
        return out


def _make_dtensor() -> Tensor:
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])


def _make_nested(layout: torch.layout) -> Tensor:
    parts = [torch.ones(2), torch.ones(3)]
    return torch.nested.nested_tensor(parts, layout=layout)


def _make_opaque() -> Tensor:
    return torch.ones(3, 3).to_mkldnn()


KINDS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "DTensor": (
        _make_dtensor,
        "is a DTensor (S(0)): pass the data parallel part of its mesh, as "
        "device_mesh=mesh['dp'], instead of a process group, or list it in "
        "ignored_states, which leaves it alone",
    ),
    "wrapper subclass": (
        lambda: _Wrapper(torch.ones(3)),
        "is a _Wrapper, a tensor subclass that wraps other tensors and has no memory "
        "of its own: pass a plain tensor, or list it in ignored_states",
    ),
    "nested": (
        lambda: _make_nested(torch.strided),
        "is a nested tensor, whose parts have shapes of their own",
    ),
    "jagged": (
        lambda: _make_nested(torch.jagged),
        "is a nested tensor, whose parts have shapes of their own",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "is a quantized tensor (torch.qint8), whose elements mean nothing without",
    ),
    "sparse": (lambda: torch.eye(3).to_sparse(), "is sparse (sparse_coo): make it"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "is sparse (sparse_csr): make it"),
    "opaque": (_make_opaque, "is opaque (_mkldnn): make it dense with to_dense()"),
}


def _state_of(module: nn.Module) -> list[Any]:
    return [
        (name, type(child), {n: id(p) for n, p in child._parameters.items()})
        for name, child in module.named_modules()
    ]


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@distributed(world_size=2)
def test_refused(kind: str, use_orig_params: bool) -> None:
    """The name and the reason; the module is as it was, its blocks as well."""
    make, reason = KINDS[kind]
    module = MLP()
    odd = nn.Parameter(make(), requires_grad=False)
    module.get_submodule("blocks.1").register_parameter("odd", odd)
    before = _state_of(module)
    shapes = [param.shape for param in module.parameters() if param is not odd]
    message = re.escape(f"parameter 'blocks.1.odd' {reason}")
    for policy in (ModuleWrapPolicy({Block}), None):
        with pytest.raises(ValueError, match=message):
            fsdp(module, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    assert _state_of(module) == before
    params = [param for param in module.parameters() if param is not odd]
    assert [param.shape for param in params] == shapes

    model = fsdp(
        module, units={Block}, ignored_states=[odd], use_orig_params=use_orig_params
    )
    model(torch.ones(2, DIM)).sum().backward()


@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_torchscript(api: str) -> None:
    """Its modules cannot have their parameters replaced; those without any can stay."""
    module = MLP()
    block = module.get_submodule("blocks.1")
    module.set_submodule("blocks.1", torch.jit.trace(block, torch.ones(2, DIM)))
    is_rows = api == "fully_shard"
    reason = "belongs to a module of TorchScript (Linear), whose parameters cannot be"
    remedy = "ignored_params" if is_rows else "ignored_modules"
    message = rf"'blocks\.1\.fc1\.weight' {re.escape(reason)} replaced.* {remedy}"
    before = _state_of(module)
    with pytest.raises(ValueError, match=message):
        shard_by(api, module, () if is_rows else {Block})
    assert _state_of(module) == before
    module.set_submodule("blocks.1", torch.jit.script(nn.Tanh()))
    shard_by(api, module, {Block})(torch.ones(2, DIM)).sum().backward()


@distributed(world_size=2)
def test_lazy() -> None:
    """A parameter without a shape."""
    module = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(4))
    message = r"parameter '1\.weight' is an UninitializedParameter, which has no shape"
    with pytest.raises(ValueError, match=message):
        fsdp(module)
    module(torch.ones(2, 3))
    fsdp(module)(torch.ones(2, 3)).sum().backward()


@distributed(world_size=2)
def test_made_by_param_init_fn() -> None:
    """What param_init_fn puts in a parameter's place is looked at as well."""
    with torch.device("meta"):
        module = nn.Linear(3, 3)

    def make(module: nn.Module) -> None:
        module.register_parameter("weight", nn.Parameter(torch.eye(3).to_sparse()))
        module.register_parameter("bias", nn.Parameter(torch.ones(3)))

    with pytest.raises(ValueError, match="parameter 'weight' is sparse"):
        fsdp(module, param_init_fn=make)


class _ScaledNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(DIM, DIM)
        self.gain = nn.Parameter(torch.ones(DIM).as_subclass(_Scaled))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.gain


@varied(use_orig_params=[True, False])
@distributed(world_size=2)
@with_model(_ScaledNet, ())
def test_subclass_with_memory(differential: Differential) -> None:
    """A subclass over memory of its own is sharded, and stays one."""
    differential.train(2)
    assert type(differential.model.module.gain) is _Scaled
