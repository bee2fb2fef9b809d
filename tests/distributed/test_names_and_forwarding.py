"""Names of parameters and modules; attributes that reach the wrapped module."""

from typing import Any

import pytest
import torch
from torch import nn

from helpers.distributed import distributed
from helpers.impl import FSDP, fsdp
from helpers.models import CASES, MLP, Block

pytestmark = pytest.mark.bookkeeping


@distributed(world_size=2)
def test_flat_parameters(world_size: int) -> None:
    """With use_orig_params=False there is one 1-D parameter per unit."""
    model = fsdp(MLP(3), units={Block}, use_orig_params=False)
    params = list(model.parameters())
    assert len(params) == 4
    for param in params:
        assert isinstance(param, nn.Parameter)
        assert param.dim() == 1
        assert param.is_leaf
        assert param.requires_grad
    numel = sum(p.numel() for p in MLP(3).parameters())
    assert numel <= sum(p.numel() for p in params) * world_size < numel + 4 * 64


@pytest.mark.trap(17)
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_sharded_shapes(use_orig_params: bool) -> None:
    """Between steps parameters are 1-D, and a rank may hold none of one."""
    model = fsdp(CASES["uneven"].build(), use_orig_params=use_orig_params)
    model(torch.randn(4, 6)).sum().backward()
    for param in model.parameters():
        assert param.dim() == 1
        if param.grad is not None:
            assert param.grad.shape == param.shape
            assert param.grad.dtype == param.dtype
            assert param.grad.device == param.device


class _Rich(nn.Sequential):
    """Has attributes, methods, properties and items."""

    greeting = "hello"

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.Tanh())
        self.config = {"hidden": 3}

    @property
    def width(self) -> int:
        return 3

    def double(self) -> Any:
        return self.width * 2


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_forwarding(use_orig_params: bool) -> None:
    """Attributes, methods and items of the module are the wrapper's too."""
    inner = _Rich()
    model = fsdp(inner, use_orig_params=use_orig_params)
    assert model.module is inner
    assert model.config is inner.config
    assert model.width == 3
    assert model.greeting == "hello"
    assert model[0] is inner[0]
    assert [type(m).__name__ for m in model.module] == ["Linear", "Tanh"]
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = model.nothing_of_that_name
    assert not hasattr(model, "nothing_of_that_name")


@distributed(world_size=2)
def test_forwarding_through_nested_units() -> None:
    """A path of attributes runs through units."""
    model = fsdp(MLP(), units={Block}, use_orig_params=True)
    assert isinstance(model.blocks[0], FSDP)
    assert isinstance(model.blocks[0].module, Block)
    assert model.blocks[0].fc1 is model.blocks[0].module.fc1
    assert model.blocks[0].fc1.in_features == 6


@distributed(world_size=2)
def test_forward_arguments() -> None:
    """Positional, keyword, nested and non-tensor arguments reach the module."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Any, *rest: Any, scale: float = 1.0, **more: Any) -> Any:
            seen.append((rest, scale, more))
            return self.fc(x) * scale

    seen: list[Any] = []
    marker = object()
    model = fsdp(Net(), use_orig_params=True)
    model(torch.randn(2, 3), 1, None, scale=2.0, name="n", marker=marker)
    assert seen == [((1, None), 2.0, {"name": "n", "marker": marker})]


@distributed(world_size=2)
def test_module_methods() -> None:
    """train, eval, apply, requires_grad_, hooks, children."""
    model = fsdp(MLP(), units={Block}, use_orig_params=True)
    model.eval()
    assert not any(m.training for m in model.modules())
    model.train()
    assert all(m.training for m in model.modules())
    calls: list[str] = []
    handles = [
        model.register_forward_pre_hook(lambda m, i: calls.append("pre")),
        model.register_forward_hook(lambda m, i, o: calls.append("post")),
        model.module.register_forward_hook(lambda m, i, o: calls.append("inner")),
    ]
    model(torch.randn(4, 6))
    assert calls == ["pre", "inner", "post"]
    for handle in handles:
        handle.remove()

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                assert module.weight.dim() == 2
                module.weight.fill_(0.5)

    model.apply(fill)
    with FSDP.summon_full_params(model):
        assert bool((model.out.weight == 0.5).all())
        assert bool((model.blocks[1].fc2.weight == 0.5).all())
