"""fully_shard: collectives of the user's own, and the hook on reduced gradients."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from fsdp_c import FSDPModule, fully_shard
from fsdp_c._fully_shard import arguments
from helpers.distributed import distributed
from helpers.groups import device_under_test, groups_destroyed, kept_mesh
from helpers.models import MLP, Block, vectors
from helpers.rows import Rows, shard_units


class _Allocates:
    """Allocates zeros, and counts."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.numels: list[int] = []

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        self.numels.append(int(size[0]))
        return torch.zeros(*size, dtype=dtype, device=device)


class Gathers(_Allocates, AllGather):
    """Gathers by broadcasts."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self.num_calls += 1
        assert not async_op
        parts = list(output_tensor.chunk(group.size()))
        return dist.all_gather(parts, input_tensor.clone(), group, async_op=True)


class Reduces(_Allocates, ReduceScatter):
    """Sums up by an all-reduce."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.num_calls += 1
        dist.all_reduce(input_tensor, op, group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


@pytest.mark.parametrize("model", ["uneven", "transformer", "frozen"])
@pytest.mark.parametrize("reshard_after_forward", [None, False])
@distributed(world_size=(2, 4))
def test_custom_collectives(model: str, reshard_after_forward: bool | None) -> None:
    """One call per unit, of memory that they allocate; set before and after a step."""
    both = Rows.of(model, reshard_after_forward=reshard_after_forward)
    both.train(1)
    modules = [m for m in both.model.modules() if isinstance(m, FSDPModule)]
    gathers, reduces = Gathers(), Reduces()
    for module in modules:
        module.set_custom_all_gather(gathers)
        module.set_custom_reduce_scatter(reduces)
    both.train(2)
    both.zero_grad()
    both.accumulate(2, no_sync=True)
    both.check()
    assert gathers.num_calls >= 3 * len(modules)
    assert reduces.num_calls <= 3 * len(modules)
    assert reduces.num_calls > 0
    assert len(reduces.numels) == 2 * reduces.num_calls
    before = gathers.num_calls, reduces.num_calls
    for module in modules:
        module.set_custom_all_gather(None)  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(None)  # type: ignore[arg-type]
    both.train(1)
    assert before == (gathers.num_calls, reduces.num_calls)


@distributed(world_size=4)
def test_custom_collectives_of_replicas_and_parts() -> None:
    """The group is that of the shards, and of the parts after forward."""
    with groups_destroyed():
        both = Rows.of("uneven", mesh=kept_mesh((2, 2), ("replicate", "shard")))
        both.model.set_custom_reduce_scatter(Reduces())
        both.model.set_custom_all_gather(Gathers())
        both.train(2)
        arguments._part_meshes.clear()
        both = Rows.of("uneven", reshard_after_forward=2)
        for module in both.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(Gathers())
        both.train(2)


@distributed(world_size=2)
def test_gather_of_several_dtypes() -> None:
    """As bytes, in one call."""
    model = nn.Linear(4, 3)
    model.scale = nn.Parameter(torch.arange(5.0, dtype=torch.float64))
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    gathers = Gathers()
    model.set_custom_all_gather(gathers)
    model.unshard()
    assert torch.equal(model.scale, torch.arange(5.0, dtype=torch.float64))
    assert gathers.num_calls == 1


@pytest.mark.parametrize("no_sync", [True, False])
@distributed(world_size=4)
def test_all_reduce_hook(no_sync: bool) -> None:
    """A hook that sums over replicas: 2 x 2 of a 1-D mesh."""
    mesh = kept_mesh((2, 2), ("replicate", "shard"))
    replicas = mesh.get_group(0)
    numels = []

    def hook(reduced: Tensor) -> None:
        numels.append(reduced.numel())
        dist.all_reduce(reduced, group=replicas)
        reduced.div_(2)

    def shard(model: nn.Module) -> Any:
        shard_units(model, [Block], mesh=mesh["shard"])
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(hook)
        return model

    both = Rows(MLP, shard, vectors)
    both.train(2)
    both.zero_grad()
    both.accumulate(2, no_sync=no_sync)
    both.check()
    num_units = sum(isinstance(m, FSDPModule) for m in both.model.modules())
    assert len(numels) == num_units * (3 if no_sync else 4)


@distributed(world_size=4)
def test_hook_sees_means(rank: int) -> None:
    """After the all-reduce of a mesh with replicas, and after a divide factor."""
    model: Any = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    fully_shard(model, mesh=kept_mesh((2, 2), ("replicate", "shard")))
    seen: list[Tensor] = []

    def hook(reduced: Tensor) -> None:
        seen.append(reduced.clone())
        reduced.fill_(7)

    model.set_all_reduce_hook(hook)
    for factor, expected in ((None, 2.5), (2.0, 5.0)):
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        model(torch.full((1, 4), rank + 1.0)).sum().backward()
        assert torch.equal(seen.pop(), torch.full((8,), expected))
        assert torch.equal(model.weight.grad.to_local(), torch.full((2, 4), 7.0))
        model.zero_grad()
    with pytest.raises(ValueError, match="native HSDP"):
        model.set_all_reduce_hook(hook, stream=object())


@distributed(world_size=2)
def test_hook_on_a_stream() -> None:
    """It runs while that stream is the current one, on the CPU too."""
    device = torch.get_device_module(device_under_test())
    stream = device.Stream()
    streams: list[Any] = []
    model: Any = fully_shard(nn.Linear(4, 4))

    def hook(reduced: Tensor) -> None:
        streams.append(device.current_stream())
        reduced.fill_(7)

    model.set_all_reduce_hook(hook, stream=stream)
    model(torch.ones(1, 4)).sum().backward()
    assert streams == [stream]
    for param in model.parameters():
        local = param.grad.to_local()
        assert torch.equal(local, torch.full_like(local, 7.0))


@distributed(world_size=2)
def test_errors() -> None:
    """What hook and comm raise reaches the user; settings that exclude each other."""

    class Raises(Gathers):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError("of a comm")

    def hook(_: Tensor) -> None:
        raise ZeroDivisionError("of a hook")

    model: Any = nn.Linear(4, 4)
    fully_shard(model)
    model.set_all_reduce_hook(hook)
    with pytest.raises(ZeroDivisionError, match="of a hook"):
        model(torch.ones(1, 4)).sum().backward()
    model.reset_iter_state()
    model.set_all_reduce_hook(None)
    model(torch.ones(1, 4)).sum().backward()
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_symm_mem_for_comm()
    with pytest.raises(ValueError, match="must be 'NCCL'"):
        model.set_symm_mem_for_comm("NVSHMEM")
    model.set_custom_all_gather(Raises())
    with pytest.raises(ZeroDivisionError, match="of a comm"):
        model(torch.ones(1, 4))
    for method in (
        "set_allocate_memory_from_process_group_for_comm",
        "set_symm_mem_for_comm",
    ):
        given = () if "symm" in method else (True,)
        with pytest.raises(AssertionError, match="all gather comm is custom: Raises"):
            getattr(model, method)(*given)
    model.reset_iter_state()
    model.set_custom_all_gather(None)
    model.set_custom_reduce_scatter(Reduces())
    with pytest.raises(AssertionError, match="reduce scatter comm is custom"):
        model.set_symm_mem_for_comm()
    model.register_forward_pre_hook(lambda m, _: m.set_custom_all_gather(None))
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        model(torch.ones(1, 4))
