"""fully_shard with parameters that have fsdp_pre_all_gather."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_c import fully_shard
from helpers.distributed import distributed
from helpers.seeds import seeded


class Scaled:
    """Sends bytes and one scale per rank, as float8 does.

    The protocol on a plain local tensor; it counts calls.
    """

    def __init__(self, local: Tensor) -> None:
        self.local = local
        self.calls: list[str] = []
        local.fsdp_pre_all_gather = self.pre  # type: ignore[attr-defined]
        local.fsdp_post_all_gather = self.post  # type: ignore[attr-defined]

    def pre(
        self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        assert mesh.ndim == 1
        assert len(size) == len(stride) == 2
        assert isinstance(module, nn.Module)
        assert isinstance(policy, MixedPrecisionPolicy)
        self.calls.append("pre")
        rows = -(-size[0] // mesh.size())
        padded = torch.zeros(rows, size[1])
        padded[: self.local.size(0)] = self.local.detach()
        scale = padded.abs().amax().clamp_min(1e-12).expand(rows, size[1]) / 127
        return ((padded / scale).round().to(torch.int8), scale.contiguous()), rows

    def post(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        quantized, scales = outputs
        assert quantized.dtype == torch.int8
        assert quantized.size(0) % metadata == 0
        self.calls.append("post" if out is None else "post out")
        whole = quantized.to(dtype) * scales.to(dtype)
        if out is not None:
            out.copy_(whole[: out.size(0)])
            return None
        return whole, (whole,)


@distributed(world_size=(1, 2, 3))
def test_quantized_gathers(world_size: int) -> None:
    """Uneven rows, metadata, several dtypes; what forward computes with."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    for module in model:
        fully_shard(module)
    fully_shard(model)
    extension = Scaled(model[0].weight._local_tensor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(3, 6, generator=seeded(step))
        whole = {name: p.full_tensor() for name, p in model.named_parameters()}
        pieces = whole["0.weight"].detach().chunk(world_size)
        scales = [piece.abs().amax() / 127 for piece in pieces]
        sent = [(p / s).round() * s for p, s in zip(pieces, scales, strict=True)]
        weight = torch.cat(sent).requires_grad_()
        hidden = nn.functional.linear(x, weight, whole["0.bias"])
        expected = nn.functional.linear(hidden, whole["1.weight"], whole["1.bias"])
        output = model(x)
        torch.testing.assert_close(output, expected)
        expected.square().sum().backward()
        output.square().sum().backward()
        torch.testing.assert_close(model[0].weight.grad.full_tensor(), weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    # Once for forward, once for backward.
    assert extension.calls == ["pre", "post"] + ["pre", "post out"] * 5
    gathered = model[0]._fsdp_c_groups[0].params._extensions[0]
    held = [t.untyped_storage().nbytes() for t in [*gathered._outputs, gathered.param]]
    assert held == [0, 0, 0]


def pre(self: Any, mesh: Any) -> Any:
    """Send both tensors."""
    return (self.a, self.b), None


def post(
    self: Any, outputs: Any, _: Any, dtype: torch.dtype, *, out: Any = None
) -> Any:
    """Make a TwoTensor over what came."""
    if out is None:
        return TwoTensor(*outputs), outputs
    assert out.a.data_ptr() == outputs[0].data_ptr()
    return None


@distributed(world_size=2)
def test_tensor_subclass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules see the subclass; without the protocol it is refused."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 6, bias=False)
    whole = model.weight.detach().clone()
    model.weight = nn.Parameter(TwoTensor(whole, 2 * whole))
    fully_shard(model)
    with pytest.raises(RuntimeError, match="'weight' is a TwoTensor, which has no"):
        model(torch.randn(2, 4))
    monkeypatch.setattr(TwoTensor, "fsdp_pre_all_gather", pre, raising=False)
    with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather and"):
        model(torch.randn(2, 4))
    monkeypatch.setattr(TwoTensor, "fsdp_post_all_gather", post, raising=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        output = model(torch.ones(1, 4))
        assert isinstance(output, TwoTensor)
        if step == 0:
            torch.testing.assert_close(output.b, 2 * output.a)
        output.sum().backward()
        assert isinstance(model.weight._local_tensor, TwoTensor)
        optimizer.step()
        optimizer.zero_grad()


@distributed(world_size=2)
def test_refusals() -> None:
    """Another dimension, and a wrong number of arguments."""
    model: Any = nn.Linear(4, 6, bias=False)
    fully_shard(model, shard_placement_fn=lambda _: Shard(1))
    Scaled(model.weight._local_tensor)
    with pytest.raises(ValueError, match="'weight' has fsdp_pre_all_gather: it can be"):
        model(torch.randn(2, 4))
    model = nn.Linear(4, 6, bias=False)
    fully_shard(model)
    Scaled(model.weight._local_tensor)
    model.weight._local_tensor.fsdp_pre_all_gather = lambda a, b: None
    with pytest.raises(AssertionError, match="Invalid fsdp_pre_all_gather of param"):
        model(torch.randn(2, 4))
