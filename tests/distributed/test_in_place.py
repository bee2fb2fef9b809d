"""Ranks of one host read each other's shards where they lie, instead of copies."""

import gc
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.distributed import distributed
from helpers.impl import FSDP, ShardingStrategy, fsdp
from helpers.reference import Differential, full_state_dict
from helpers.rows import shard_by
from helpers.seeds import seeded

pytestmark = pytest.mark.cpu_only("an accelerator's ranks gather")

WIDTH = 64
UNITS = 3


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.doubles = False
        self.pause_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause_s)
        if self.doubles:
            with torch.no_grad():
                self.weight.mul_(2)
        return torch.tanh(x @ self.weight + self.bias)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[_Layer() for _ in range(UNITS)])


def _wrap(api: str, model: nn.Module | None = None, **options: Any) -> Any:
    return shard_by(api, model or _model(), {_Layer}, **options)


def _mapped_nbytes() -> int:
    """Bytes of the shards' files; the kernel may join mappings side by side."""
    ranges = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "fsdp_c_shards" in line:
                ranges.append([int(end, 16) for end in line.split()[0].split("-")])
    return sum(end - begin for begin, end in ranges)


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=(2, 3))
def test_shards_are_in_one_file(api: str) -> None:
    """From the first forward to the end of the model."""
    gc.collect()
    before = _mapped_nbytes()
    model = _wrap(api)
    assert _mapped_nbytes() == before
    model(torch.ones(2, WIDTH))
    # Of each layer at least its shards: this rank's, and what it reads of the others'.
    assert _mapped_nbytes() >= before + UNITS * WIDTH * WIDTH * 4
    del model
    gc.collect()
    dist.barrier()
    assert _mapped_nbytes() == before


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=(2, 3))
def test_no_descriptor_is_left(api: str) -> None:
    """The files are mapped and closed, and the mappings go with each model."""
    counts = []
    for _ in range(4):
        model = _wrap(api)
        model(torch.ones(2, WIDTH)).sum().backward()
        in_use = _num_descriptors()
        del model
        gc.collect()
        dist.barrier()
        counts.append((in_use, _num_descriptors(), _mapped_nbytes()))
    # The first model may have opened what its group keeps.
    assert counts[1:] == [counts[1]] * 3
    assert counts[1][0] == counts[1][1]


@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
)
@distributed(world_size=2)
def test_kept_parameters_are_copies(strategy: ShardingStrategy) -> None:
    """They may be used when an owner writes its shard."""
    gc.collect()
    before = _mapped_nbytes()
    model = _wrap("FSDP", sharding_strategy=strategy)
    model(torch.ones(2, WIDTH)).sum().backward()
    assert _mapped_nbytes() == before


@pytest.mark.parametrize("value", ["copy", "rings"])
@distributed(world_size=2)
def test_switch(rank: int, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP_C_TRANSPORT=copy on one rank turns it off on all; rings do not."""
    group = dist.new_group()
    if rank == 1 or value == "rings":
        monkeypatch.setenv("FSDP_C_TRANSPORT", value)
    gc.collect()
    before = _mapped_nbytes()
    model = _wrap("FSDP", process_group=group)
    loss = model(torch.ones(2, WIDTH)).sum()
    assert (_mapped_nbytes() > before) == (value == "rings")
    loss.backward()
    expected = _model()(torch.ones(2, WIDTH)).sum()
    torch.testing.assert_close(loss, expected)
    del model, loss
    gc.collect()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=(2, 3))
def test_writes_in_forward_reach_nobody(rank: int, api: str) -> None:
    """As with FSDP1 they are gone when the unit reshards."""
    model = _wrap(api)
    x = torch.randn(2, WIDTH, generator=seeded(1))
    expected = _model()(x)
    torch.testing.assert_close(model(x), expected)
    inner: Any = model[1]
    layer = inner.module if isinstance(inner, FSDP) else inner
    doubling = _model()
    doubling[1].doubles = layer.doubles = rank == 0
    theirs = doubling(x)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(x), theirs)
    layer.doubles = False
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=(2, 3))
def test_an_owner_writes_after_its_forward(rank: int, api: str) -> None:
    """A slow rank still computes with the values from before the write."""
    model = _wrap(api)
    x = torch.randn(2, WIDTH, generator=seeded(1))
    expected = _model()(x)
    last: Any = model[UNITS - 1]
    layer = last.module if isinstance(last, FSDP) else last
    for _ in range(3):
        layer.pause_s = 0.1 * rank
        with torch.no_grad():
            out = model(x)
            layer.pause_s = 0.0
            kept = [param.detach().clone() for param in model.parameters()]
            for param in model.parameters():
                param.zero_()
        torch.testing.assert_close(out, expected)
        dist.barrier()
        with torch.no_grad():
            for param, value in zip(model.parameters(), kept, strict=True):
                param.copy_(value)
        dist.barrier()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3))
def test_views_of_a_shard_stay_valid(use_orig_params: bool) -> None:
    """The first forward moves shards to a file; their addresses stay."""
    model = fsdp(_model(), units={_Layer}, use_orig_params=use_orig_params)
    params = list(model.parameters())
    arrays = [param.detach().numpy() for param in params]
    addresses = [param.data_ptr() for param in params]
    optimizer = torch.optim.SGD(params, lr=0.1)
    before = full_state_dict(model)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    assert [param.data_ptr() for param in params] == addresses
    for param, array in zip(params, arrays, strict=True):
        assert torch.equal(param.detach(), torch.from_numpy(array))
    after = full_state_dict(model)
    assert any(not torch.equal(after[name], before[name]) for name in before)


@distributed(world_size=(2, 4))
def test_training() -> None:
    """Losses, gradients and parameters are those of the unsharded model."""
    differential = Differential(
        _model,
        lambda model: _wrap("FSDP", model),
        lambda generator: (torch.randn(2, WIDTH, generator=generator),),
        use_orig_params=True,
    )
    differential.train(3)
    differential.accumulate(2, no_sync=True)
