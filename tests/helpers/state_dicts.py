"""State dicts of every kind: saving them, and putting sharded tensors together.

`whole_state` knows only what a sharded tensor says of itself, so it is a check of that.
"""

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from fsdp_c import LocalStateDictConfig, ShardedStateDictConfig
from helpers.impl import FSDP, FullStateDictConfig, StateDictType, fsdp

FULL = StateDictType.FULL_STATE_DICT
SHARDED = StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT
CONFIGS: dict[StateDictType, Any] = {
    FULL: FullStateDictConfig,
    SHARDED: ShardedStateDictConfig,
    LOCAL: LocalStateDictConfig,
}
WIDTH = 5


def state_dicts_of(
    model: nn.Module, kind: StateDictType, *, offloads: bool
) -> contextlib.AbstractContextManager[Any]:
    """Return a context with state dicts of a kind, in host memory or not."""
    config = CONFIGS[kind](offload_to_cpu=offloads)
    context: contextlib.AbstractContextManager[Any]
    context = FSDP.state_dict_type(model, kind, config)
    return context


def whole_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` with whole tensors for sharded ones. Collective.

    There is one exchange for all ShardedTensors of a group.
    """
    sharded = {k: v for k, v in state.items() if isinstance(v, ShardedTensor)}
    found = {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in state.items()
    }
    for group in dict.fromkeys(value._process_group for value in sharded.values()):
        mine = {
            key: [
                (s.metadata.shard_offsets, s.tensor.detach().cpu().double().numpy())
                for s in value.local_shards()
            ]
            for key, value in sharded.items()
            if value._process_group is group
        }
        theirs: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(theirs, mine, group=group)
        for key in mine:
            shards = [shard for each in theirs for shard in each[key]]
            found[key] = _put_together(sharded[key], shards)
    return found


def _put_together(value: ShardedTensor, shards: list[Any]) -> Tensor:
    result = torch.zeros(value.size(), dtype=value.dtype)
    num_written = torch.zeros(value.size(), dtype=torch.int64)
    for offsets, part in shards:
        place = tuple(
            slice(first, first + size)
            for first, size in zip(offsets, part.shape, strict=True)
        )
        result[place] = torch.from_numpy(part)
        num_written[place] += 1
    assert bool((num_written == 1).all()), "the shards do not tile the tensor"
    return result


def local_part(value: Any) -> Tensor | None:
    """Return the tensor in which this rank holds its part of ``value``."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return shards[0].tensor if shards else None
    assert isinstance(value, Tensor)
    return value


def save(model: nn.Module, kind: Any, config: Any = None, **kwargs: Any) -> Any:
    """Return ``model.state_dict(**kwargs)`` of this kind."""
    with FSDP.state_dict_type(model, kind, config):
        return model.state_dict(**kwargs)


def load(model: nn.Module, kind: Any, state: Any, **kwargs: Any) -> Any:
    """Return ``model.load_state_dict(state, **kwargs)`` of this kind."""
    with FSDP.state_dict_type(model, kind):
        return model.load_state_dict(state, **kwargs)


class Inner(nn.Module):
    """The innermost unit: two layers, of which the first is shared over units."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 7)
        self.fc2 = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


class Middle(nn.Module):
    """A unit with a nested one, buffers, a scalar, and a frozen bf16 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.low = nn.Linear(WIDTH, 3, dtype=torch.bfloat16).requires_grad_(False)
        self.register_buffer("gain", torch.rand(1) + 0.5)
        self.register_buffer("gone", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        low = self.low(x.to(self.low.weight.dtype)).to(x.dtype).sum(-1, keepdim=True)
        gain = torch.as_tensor(self.gain).to(x.dtype)
        return x + self.norm(self.inner(x)) * self.scale * gain + low


class Everything(nn.Module):
    """All that a state dict can have; ignored and tied parameters in the root."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Middle(), Middle()])
        first, second = self.blocks[0].inner, self.blocks[1].inner
        assert isinstance(first, Inner)
        assert isinstance(second, Inner)
        second.fc1.weight = first.fc1.weight  # over units: the root shards it
        self.ignored = nn.Linear(WIDTH, 2)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.inp.weight  # in one unit
        self.tail = nn.Linear(WIDTH, 1)
        self.tail.weight.requires_grad_(False)
        self.again = self.tail  # a module under two names
        for buffer in self.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        ignored = self.ignored(x.to(self.ignored.weight.dtype)).to(x.dtype)
        x = self.out(x) + ignored.sum(-1, keepdim=True)
        return self.again(x).squeeze(-1)


def wrap_everything(module: nn.Module, *, is_nested: bool = True, **kwargs: Any) -> Any:
    """Wrap an Everything: its units one in another, or the root only."""
    units = {Inner, Middle} if is_nested else ()
    ignored = module.get_submodule("ignored")
    return fsdp(module, units=units, ignored_states=[ignored], **kwargs)


def everything(seed: int = 0, **kwargs: Any) -> tuple[Everything, Any]:
    """Return an Everything, and a wrapped copy of it."""
    reference = Everything(seed)
    return reference, wrap_everything(copy.deepcopy(reference), **kwargs)
