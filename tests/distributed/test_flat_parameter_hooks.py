"""Hooks on flat parameters run, on the sharded gradient once it is complete."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from helpers.distributed import distributed
from helpers.impl import FSDP, CPUOffload, fsdp
from helpers.models import MLP, Block
from helpers.reference import Differential, assert_same, with_model


def _flat_params(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@distributed(world_size=2)
def test_register_hook(strategy: str, offload: bool) -> None:
    """It sees the mean over the ranks, this rank's shard, and may replace it."""
    differential = Differential.of_model(
        "mlp",
        strategy=strategy,
        use_orig_params=False,
        cpu_offload=CPUOffload(offload_params=offload),
    )
    seen: list[tuple[Tensor, Tensor]] = []
    for param in _flat_params(differential.model):
        param.register_hook(lambda grad: grad * 2)
        param.register_hook(
            lambda grad, param=param: seen.append((param, grad.clone()))
        )
    for param in differential.reference.parameters():
        param.register_hook(lambda grad: grad * 2)
    for _ in range(3):
        seen.clear()
        differential.zero_grad()
        differential.forward_backward()
        differential.check()
        assert len(seen) == len(_flat_params(differential.model))
        for param, grad in seen:
            assert torch.equal(param.grad, grad)
        differential.step()


@distributed(world_size=2)
@with_model(use_orig_params=False)
def test_accumulation(differential: Differential) -> None:
    """A hook sees one backward's gradient, not the sum of those before."""
    for param in _flat_params(differential.model):
        param.register_hook(lambda grad: grad * 3)
    for param in differential.reference.parameters():
        param.register_hook(lambda grad: grad * 3)
    for _ in range(2):
        differential.zero_grad()
        for _ in range(3):
            differential.forward_backward()
        differential.checked_step()


@distributed(world_size=2)
def test_no_sync() -> None:
    """Under no_sync() no sharded gradient is complete."""
    model = fsdp(MLP(1), units={Block})
    calls: list[int] = []
    params = _flat_params(model)
    for param in params:
        param.register_hook(lambda grad: calls.append(grad.numel()))
    x = torch.randn(2, 6)
    for sharded in (False, True):
        with model.no_sync(sharded=sharded):
            model(x).sum().backward()
        assert calls == []
    model(x).sum().backward()
    assert sorted(calls) == sorted(param.numel() for param in params)


@distributed(world_size=2)
@with_model(use_orig_params=False)
def test_post_accumulate_hook(differential: Differential) -> None:
    """An optimizer's step in it is the step after backward, without gradients."""
    optimizers = {
        param: torch.optim.AdamW([param], lr=0.1)
        for param in _flat_params(differential.model)
    }

    def step(param: Tensor) -> None:
        optimizers[param].step()
        param.grad = None

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)
    reference = torch.optim.AdamW(differential.reference.parameters(), lr=0.1)
    for _ in range(3):
        reference.zero_grad()
        differential.forward_backward()
        reference.step()
        assert all(param.grad is None for param in optimizers)
        with FSDP.summon_full_params(differential.model, writeback=False):
            for mine, expected in zip(
                differential.model.parameters(),
                differential.reference.parameters(),
                strict=True,
            ):
                assert_same("parameter", mine.detach(), expected.detach())


@distributed(world_size=2)
@with_model(use_orig_params=False)
def test_post_accumulate_hook_keeps_the_gradient(differential: Differential) -> None:
    """It sees the accumulated gradient, and may change it in place or replace it."""

    def halve(param: Tensor) -> None:
        param.grad.mul_(0.5)

    def replace(param: Tensor) -> None:
        param.grad = param.grad * 0.5

    for hook in (halve, replace):
        handles = [
            param.register_post_accumulate_grad_hook(hook)
            for model in (differential.model, differential.reference)
            for param in _flat_params(model)
        ]
        differential.zero_grad()
        for _ in range(3):
            differential.forward_backward()
        differential.checked_step()
        for handle in handles:
            handle.remove()
    differential.train(2)


@distributed(world_size=2)
def test_removed_hooks() -> None:
    """A hook that was removed does not run; one that was added late does."""
    model = fsdp(MLP(1), units={Block})
    calls: list[str] = []
    (param, *_) = _flat_params(model)
    handle = param.register_hook(lambda grad: calls.append("first"))
    loss = model(torch.randn(2, 6)).sum()
    handle.remove()
    param.register_hook(lambda grad: calls.append("second"))
    loss.backward()
    assert calls == ["second"]


@distributed(world_size=2)
def test_a_hook_that_raises() -> None:
    """Its exception leaves backward; the model works afterwards."""
    model = fsdp(MLP(1), units={Block})
    params = _flat_params(model)

    def fail(grad: Tensor) -> None:
        raise KeyError("mine")

    for _ in range(5):  # on a device a thread of autograd may still end the last one
        handle = params[0].register_hook(fail)
        with pytest.raises(KeyError, match="mine"):
            model(torch.ones(2, 6)).sum().backward()
        handle.remove()
        for param in params:
            param.grad = None
        model(torch.ones(2, 6)).sum().backward()
        assert all(param.grad is not None for param in params)

    handle = params[0].register_hook(lambda grad: grad[:1])
    with pytest.raises(
        (ValueError, RuntimeError), match="has changed the size of value"
    ):
        model(torch.ones(2, 6)).sum().backward()
    handle.remove()


@distributed(world_size=2)
def test_hooks_on_original_parameters() -> None:
    """With use_orig_params they run with this rank's whole gradient."""
    model = fsdp(nn.Linear(3, 2), use_orig_params=True)
    shapes: list[torch.Size] = []
    for param in model.parameters():
        param.register_hook(lambda grad: shapes.append(grad.shape))
    model(torch.ones(1, 3)).sum().backward()
    assert sorted(shapes) == [torch.Size([2]), torch.Size([2, 3])]


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_beside_fsdp1(rank: int, use_orig_params: bool) -> None:
    """What hooks see: FSDP1's before the reduction, or nothing."""
    cpu = torch.device("cpu")
    seen: dict[str, list[Any]] = {}
    for wrapper in (TorchFSDP, FSDP):
        found = seen[wrapper.__module__.partition(".")[0]] = []
        model = wrapper(
            nn.Linear(4, 4, bias=False), device_id=cpu, use_orig_params=use_orig_params
        )
        for param in model.parameters():
            param.register_hook(
                lambda grad, found=found: found.append(
                    (grad.numel(), float(grad.max()))
                )
            )
            param.register_post_accumulate_grad_hook(
                lambda param, found=found: found.append(param.grad.numel())
            )
        x = torch.full((1, 4), float(rank + 1))
        with model.no_sync():
            model(x).sum().backward()
        found.append("no_sync")
        model(x).sum().backward()
    whole = [(16, rank + 1.0), 16]
    if use_orig_params:
        assert seen == {"torch": ["no_sync"], "fsdp_c": [*whole, "no_sync", *whole]}
    else:  # the mean over ranks of both backwards
        shard = ["no_sync", (8, 3.0), 8]
        assert seen == {"torch": [*whole, "no_sync", *whole], "fsdp_c": shard}
