"""Views of whole parameters that the user keeps: reading one names its unit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_c import fully_shard
from helpers.distributed import distributed
from helpers.impl import fsdp
from helpers.models import DIM, Block
from helpers.reference import sgd
from helpers.rows import APIS, shard_by

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.11"),
    reason="torch 2.11 cannot refuse to read freed memory: it crashes",
)

READS: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda view: view.sum(),
    "transposed": lambda view: torch.ones(1, view.shape[1]) @ view.t(),
    "row": lambda view: view[1].clone(),
    "reshaped": lambda view: view.reshape(-1).sum(),
    "strided": lambda view: view.as_strided((2,), (1,), 3).sum(),
    "split": lambda view: [part.sum() for part in view.split(1)],
    "linear": lambda view: nn.functional.linear(torch.ones(2, view.shape[1]), view),
    "written": lambda view: view.zero_(),
    "copied": lambda view: torch.empty(view.shape).copy_(view),
    "list": lambda view: view.tolist(),
    "numpy": lambda view: view.cpu().numpy(),
    "address": lambda view: view.data_ptr(),
    "storage": lambda view: torch.empty(0).set_(view.untyped_storage()).sum(),
    "printed": repr,
}


def _model(api: str) -> Any:
    return shard_by(api, nn.Sequential(Block(), Block()), {Block})


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_no_read_ends_in_an_error_of_torch(api: str, when: str) -> None:
    """Neither now nor when the memory belongs to others: after two steps."""
    model = _model(api)
    optimizer = sgd(model.parameters())
    kept: list[Tensor] = []
    block = next(module for module in model.modules() if isinstance(module, Block))

    def keep(module: nn.Module, _args: object) -> None:
        kept.append(module.weight.detach())  # type: ignore[operator]

    handle = block.fc1.register_forward_pre_hook(keep)
    loss = model(torch.ones(2, DIM)).sum()
    handle.remove()
    if when == "backward":
        loss.backward()
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
            model(torch.ones(2, DIM)).sum().backward()
    for name, read in READS.items():
        with pytest.raises(RuntimeError, match="unit '0' is sharded now") as raised:
            read(kept[0])
        assert "Keep a clone" in str(raised.value), name
    assert kept[0].shape == (10, DIM)
    optimizer.zero_grad()
    model(torch.ones(2, DIM)).sum().backward()


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=2)
def test_a_view_that_a_loss_uses(api: str) -> None:
    """Autograd saves it in forward and reads it in backward, after its unit's end."""
    model = _model(api)
    block = next(module for module in model.modules() if isinstance(module, Block))
    extra: list[Tensor] = []

    def use(module: nn.Module, _args: object) -> None:
        x = torch.ones(2, DIM, requires_grad=True)
        extra.append(nn.functional.linear(x, module.weight.detach()))  # type: ignore[operator]

    block.fc1.register_forward_pre_hook(use)
    model(torch.ones(2, DIM)).sum().backward()
    with pytest.raises(RuntimeError, match="unit '0' is sharded now"):
        extra[0].square().sum().backward()


@distributed(world_size=2)
def test_a_resharded_parameter_is_refused() -> None:
    """Also as a parameter of another unit, which has no memory to copy."""
    kept: list[Tensor] = []
    model = _model("fully_shard")
    model[0].fc1.register_forward_pre_hook(
        lambda module, _args: kept.append(module.weight.detach())
    )
    model(torch.ones(2, DIM))
    other = nn.Linear(DIM, 10)
    other.weight = nn.Parameter(kept[0])
    with pytest.raises(RuntimeError, match="unit '0' is sharded now"):
        fsdp(other)
    with pytest.raises(RuntimeError, match="unit '0' is sharded now"):
        fully_shard(other)(torch.ones(2, DIM))
