"""Reductions over shared memory read gradients where autograd left them."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_c
from fsdp_c import MixedPrecisionPolicy
from helpers.distributed import distributed
from helpers.impl import FSDP, MixedPrecision
from helpers.rows import APIS, shard_by
from helpers.seeds import seeded

pytestmark = pytest.mark.cpu_only("an accelerator's ranks have no shared memory")

WIDTH = 64

Train = Callable[[Any, Tensor], None]


class _Layer(nn.Module):
    """Some of its parameters are frozen, odd in size, or not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH + 3))
        self.sometimes = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.uses_all = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.weight + self.bias) * self.scale[3:] + self.frozen
        return x + (x @ self.sometimes.T).sum() if self.uses_all else x


def _make(api: str, group: dist.ProcessGroup, **options: Any) -> Any:
    torch.manual_seed(0)
    if api == "fully_shard":
        options["mesh"] = DeviceMesh.from_group(group, "cpu")
    else:
        options["process_group"] = group
    return shard_by(api, nn.Sequential(_Layer(), _Layer()), {_Layer}, **options)


def _layers(model: nn.Module) -> list[_Layer]:
    return [each for each in model.modules() if isinstance(each, _Layer)]


def _grads(model: nn.Module) -> list[Tensor | None]:
    found = [param.grad for param in model.parameters()]
    return [g.to_local() if hasattr(g, "to_local") else g for g in found]


def _backward(model: Any, x: Tensor) -> None:
    model(x).square().mean().backward()


def _some_unused(model: Any, x: Tensor) -> None:
    """Rank 0 does not use some parameters, and nobody uses those of one layer."""
    first, second = _layers(model)
    first.uses_all = dist.get_rank() > 0
    second.uses_all = False
    _backward(model, x)
    first.uses_all = second.uses_all = True


def _twice(model: Any, x: Tensor) -> None:
    _backward(model, x)
    _backward(model, x + 1)


def _accumulate(model: Any, x: Tensor) -> None:
    if isinstance(model, FSDP):
        with model.no_sync():
            _backward(model, x)
    else:
        model.set_requires_gradient_sync(False)
        _backward(model, x)
        model.set_requires_gradient_sync(True)
    _backward(model, x + 1)


def _accumulate_sharded(model: Any, x: Tensor) -> None:
    if isinstance(model, FSDP):
        with model.no_sync(sharded=True):
            _backward(model, x)
            _some_unused(model, x - 1)
    _backward(model, x + 1)


def _one_graph_twice(model: Any, x: Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def _weights_used_twice(model: Any, x: Tensor) -> None:
    (model(x).square().mean() + model(x + 1).square().mean()).backward()


TRAINS: list[Train] = [
    _backward,
    _some_unused,
    _twice,
    _accumulate,
    _accumulate_sharded,
    _one_graph_twice,
    _weights_used_twice,
]


def _compare(api: str, train: Train, monkeypatch: Any, **options: Any) -> None:
    """Gradients are those of a group whose ranks share no memory, to the bit."""
    groups = [dist.new_group(), dist.new_group()]
    monkeypatch.setenv("FSDP_C_TRANSPORT", "c10d")
    plain = _make(api, groups[0], **options)
    x = torch.randn(4, WIDTH, generator=seeded(dist.get_rank()))
    train(plain, x)
    expected = _grads(plain)
    monkeypatch.delenv("FSDP_C_TRANSPORT")
    model = _make(api, groups[1], **options)
    for _ in range(2):
        train(model, x)
        found = _grads(model)
        assert len(found) == len(expected)
        for grad, other in zip(found, expected, strict=True):
            assert (grad is None) == (other is None)
            assert grad is None or torch.equal(grad, other)
        model.zero_grad()
    assert any(grad is not None for grad in expected)
    del plain, model
    gc.collect()
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("train", TRAINS)
@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_gradients(api: str, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they accumulate, and whichever parameters were used."""
    _compare(api, train, monkeypatch)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=2)
def test_mixed_precision(
    api: str, reduce_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of another dtype than they are reduced in are packed."""
    dtypes: dict[str, Any] = {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": reduce_dtype,
    }
    if api == "fully_shard":
        _compare(api, _backward, monkeypatch, mp_policy=MixedPrecisionPolicy(**dtypes))
    else:
        _compare(api, _twice, monkeypatch, mixed_precision=MixedPrecision(**dtypes))


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=(2, 3))
def test_optimizer_in_backward(api: str) -> None:
    """Each unit is stepped with its gradient alone, as after the backward."""
    x = torch.randn(4, WIDTH, generator=seeded(dist.get_rank()))
    plain = _make(api, dist.group.WORLD)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = _make(api, dist.group.WORLD)
    fsdp_c.optimizer_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1))
    for _ in range(3):
        _backward(plain, x)
        optimizer.step()
        optimizer.zero_grad()
        _backward(model, x)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, other)
