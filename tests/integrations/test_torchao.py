"""torchao's float8 training under fully_shard, beside torch's own fully_shard."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_c import checkpoint, fully_shard
from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import groups_destroyed, kept_mesh
from helpers.seeds import generator

DIM = 32  # float8 products need multiples of 16


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


def _make_model(
    function: Any, *, emulate: bool, mesh: DeviceMesh | None = None, **options: Any
) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(_Block(), _Block(), nn.Linear(DIM, 3))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name != "2"
    )
    if mesh is None:
        mesh = kept_mesh((dist.get_world_size(),), ("shard",))
    for block in model[:2]:
        function(block, mesh=mesh, **options)
    return function(model, mesh=mesh, **options)


def _train(
    model: Any, rank: int, *, precompute: bool, adamw: bool = True
) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """Return the optimizer, and every loss, gradient and resulting parameter."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    params = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if adamw:
        optimizer = torch.optim.AdamW(params, lr=0.01)
    seen: list[Tensor] = []
    for step in range(3):
        x = torch.randn(16, DIM, generator=generator(step, rank))
        loss = model(x).float().square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.to_local().clone() for p in params)]
        optimizer.step()
        optimizer.zero_grad()
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
    return optimizer, seen + [param.detach().full_tensor() for param in params]


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("precompute", [True, False])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("adamw", [True, False])
@pytest.mark.parametrize("reshards", [True, False])
@distributed(world_size=2, timeout_s=120)
def test_bits_of_torch(
    rank: int,
    emulate: bool,
    precompute: bool,
    param_dtype: torch.dtype | None,
    adamw: bool,
    reshards: bool,
) -> None:
    """Losses, gradients and parameters, with products emulated and the CPU's own."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    expected, found = (
        _train(
            _make_model(
                function,
                emulate=emulate,
                mp_policy=policy,
                reshard_after_forward=reshards,
            ),
            rank,
            precompute=precompute,
            adamw=adamw,
        )[1]
        for function in (torch_fully_shard, fully_shard)
    )
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@distributed(world_size=2, timeout_s=120)
def test_checkpoint(rank: int, tmp_path: Path) -> None:
    """What one rank saves, two load: float8 weights have their fp32 values."""
    with groups_destroyed():
        mesh = DeviceMesh(TEST_DEVICE, [0])
        expected: list[Any] = [None]
        if rank == 0:
            model = _make_model(fully_shard, emulate=True, mesh=mesh)
            optimizer, _ = _train(model, rank, precompute=True)
            expected = [[p.detach().full_tensor() for p in model.parameters()]]
            checkpoint.save(
                tmp_path / "c", model, optimizer, process_group=mesh.get_group()
            )
        dist.broadcast_object_list(expected)
        model = _make_model(fully_shard, emulate=True)
        optimizer, _ = _train(model, rank, precompute=False)
        checkpoint.load(tmp_path / "c", model, optimizer)
        for param, whole in zip(model.parameters(), expected[0], strict=True):
            assert torch.equal(param.detach().full_tensor(), whole)
        assert type(model[0].up.weight.to_local()).__module__.startswith("torchao")
        model(torch.ones(16, DIM)).sum().backward()
