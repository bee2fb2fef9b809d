"""A student and a teacher, as in DINOv2.

The teacher runs without gradients and follows the student: its shards are written
between steps. torch's FSDP1 keeps a unit that it did not reshard after such a forward
whole, and goes on with its old weights; DINOv2 therefore reshards the teacher by hand,
through private functions. Here that is not needed, and does no harm.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from helpers.distributed import distributed
from helpers.impl import FSDP, fsdp
from programs.unsharded import check_weights, draw, mean_over_ranks

MOMENTUM = 0.5


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x))


class _Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def _build() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"backbone": _Backbone(), "head": nn.Linear(8, 5)}).double()


def _reshard_by_hand(model: nn.ModuleDict) -> None:
    for part in model.values():
        for unit in TorchFSDP.fsdp_modules(part):
            if unit._handle is not None:
                _reshard(unit, unit._handle, True)


def _loss(
    student: nn.ModuleDict, teacher: nn.ModuleDict, x: Tensor, *, reshards: bool = False
) -> Tensor:
    with torch.no_grad():
        target = teacher["head"](teacher["backbone"](x)).softmax(-1)
        if reshards:
            _reshard_by_hand(teacher)
    out = student["head"](student["backbone"](x + 0.1)).log_softmax(-1)
    again = student["backbone"](x)  # a second crop
    return -(target * out).sum(-1).mean() + again.square().mean()


def _update_teacher(student: nn.Module, teacher: nn.Module) -> None:
    with torch.no_grad():
        theirs, mine = list(teacher.parameters()), list(student.parameters())
        torch._foreach_mul_(theirs, MOMENTUM)
        torch._foreach_add_(theirs, mine, alpha=1 - MOMENTUM)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("reshards", [True, False])
@distributed(world_size=2)
def test_weights(
    rank: int, strategy: str, use_orig_params: bool, reshards: bool
) -> None:
    """Student and teacher; the gradients go through a scaler and are clipped."""

    def wrap() -> nn.ModuleDict:
        model = _build()
        for name in model:
            model[name] = fsdp(
                model[name],
                strategy=strategy,
                units={_Block},
                use_orig_params=use_orig_params,
                sync_module_states=True,
            )
        return model

    student, teacher = wrap(), wrap()
    teacher.requires_grad_(False)
    reference, reference_teacher = _build(), _build()
    mine = torch.optim.AdamW(student.parameters(), lr=0.05)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.05)
    scaler = ShardedGradScaler(device="cpu", init_scale=2.0**10)
    for step in range(5):
        mine.zero_grad()
        x = draw(4, 8, seed=10 * step + rank)
        scaler.scale(_loss(student, teacher, x, reshards=reshards)).backward()
        scaler.unscale_(mine)
        for each in student.values():
            each.clip_grad_norm_(0.5)
        scaler.step(mine)
        scaler.update()
        _update_teacher(student, teacher)

        expected.zero_grad()
        mean_over_ranks(
            lambda r, step=step: _loss(
                reference, reference_teacher, draw(4, 8, seed=10 * step + r)
            )
        ).backward()
        for part in reference.values():
            nn.utils.clip_grad_norm_(part.parameters(), 0.5)
        expected.step()
        _update_teacher(reference, reference_teacher)
    check_weights(student, reference)
    check_weights(teacher, reference_teacher)
    assert len(FSDP.fsdp_modules(teacher)) == 4
