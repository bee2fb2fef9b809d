"""clip_grad_norm_ against torch.nn.utils on the unsharded model."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

from helpers.distributed import distributed, every_strategy, varied
from helpers.impl import FSDP, MixedPrecision, fsdp
from helpers.models import CASES, MLP, Block
from helpers.reference import Differential, with_model
from helpers.tensor_parallel import grad_of, two_meshes, whole_value
from helpers.transports import OWN, over


@pytest.mark.trap(15)
@pytest.mark.trap(16)
@every_strategy
@varied(model=["uneven", "unused"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@distributed(world_size=(2, 3))
@with_model()
def test_equals_the_unsharded_norm(
    differential: Differential, norm_type: float
) -> None:
    """The norm, the clipped gradients and the step; far above the norm too."""
    for max_norm in (0.01, 1e4):
        differential.zero_grad()
        differential.forward_backward()
        differential.clip(max_norm, norm_type)
        differential.checked_step()


@pytest.mark.trap(15)
@distributed(world_size=2)
def test_mixed_strategies() -> None:
    """Parameters that are not sharded count once, those that are by the shard."""

    def wrap(model: torch.nn.Module) -> object:
        assert isinstance(model, MLP)
        for index, name in enumerate(["FULL_SHARD", "NO_SHARD", "SHARD_GRAD_OP"]):
            model.blocks[index] = fsdp(
                model.blocks[index], strategy=name, use_orig_params=True
            )
        return fsdp(model, use_orig_params=True)

    differential = Differential.of_case(CASES["mlp"], wrap, use_orig_params=True)
    for _ in range(2):
        differential.zero_grad()
        differential.forward_backward()
        differential.clip(0.05)
        differential.checked_step()


@pytest.mark.trap(15)
@distributed(world_size=2)
def test_mixed_dtypes() -> None:
    """bf16 and fp32 gradients have one norm."""
    differential = Differential.of_case(
        CASES["mixed_dtype"],
        lambda module: fsdp(module, use_orig_params=True),
        use_orig_params=True,
    )
    differential.forward_backward()
    differential.clip(0.05)
    differential.check()


class _Spectrum(torch.nn.Module):
    """A filter of frequencies, and fp64 parameters beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = torch.nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.out = torch.nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(
            torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4)
        )
        return out


@pytest.mark.parametrize("has_parallel", [False, True])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@distributed(world_size=(2, 3))
def test_complex_gradients(
    use_orig_params: bool, norm_type: float, has_parallel: bool
) -> None:
    """They count by their absolute values, as in torch.nn.utils.

    Also beside tensor parallel parameters.
    """
    expected = _Spectrum()
    model = copy.deepcopy(expected)
    mesh = None
    if has_parallel:
        mesh, tp = two_meshes(dist.get_world_size(), 1)
        parallelize_module(model.out, tp, ColwiseParallel())
    model = fsdp(model, use_orig_params=use_orig_params, device_mesh=mesh)
    x = torch.randn(5, 4, dtype=torch.float64)
    for each in (expected, model):
        each(x).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01, norm_type)
    torch.testing.assert_close(model.clip_grad_norm_(0.01, norm_type).real, norm)
    with FSDP.summon_full_params(model, with_grads=True):
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(whole_value(grad_of(param)), other.grad)


@distributed(world_size=2)
def test_without_gradients(rank: int) -> None:
    """A warning and a norm of zero, not an error."""
    model = fsdp(Block(), use_orig_params=True)
    with pytest.warns(UserWarning, match=f"rank {rank} with no gradients"):
        assert model.clip_grad_norm_(1.0).item() == 0.0


@distributed(world_size=2)
def test_norm_type_may_be_an_int_or_a_word() -> None:
    """2 is 2.0 and "inf" is infinity."""
    model = fsdp(Block(), use_orig_params=True)
    model(torch.randn(4, 6)).square().mean().backward()
    assert model.clip_grad_norm_(1e9, 2) == model.clip_grad_norm_(1e9, 2.0)
    assert model.clip_grad_norm_(1e9, "inf") == model.clip_grad_norm_(1e9, math.inf)


@distributed(world_size=2)
def test_not_finite(rank: int) -> None:
    """A rank's infinite gradient shows in every rank's norm."""
    model = fsdp(Block(), use_orig_params=True)
    x = torch.randn(4, 6) * (math.inf if rank == 0 else 1.0)
    model(x).square().mean().backward()
    norm = model.clip_grad_norm_(1.0)
    assert not math.isfinite(norm.item())


@pytest.mark.bookkeeping
@distributed(world_size=2)
def test_only_on_the_root() -> None:
    """A nested unit refuses: the norm would be of a part."""
    model = fsdp(MLP(), units={Block}, use_orig_params=True)
    model(torch.randn(4, 6)).square().mean().backward()
    with pytest.raises(RuntimeError, match="root"):
        model.blocks[0].clip_grad_norm_(1.0)
    model.clip_grad_norm_(1.0)


@pytest.mark.trap(15)
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_bf16_gradients(use_orig_params: bool) -> None:
    """The norm of bf16 gradients is summed in fp32 and returned in bf16."""
    model = fsdp(
        Block(),
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16, keep_low_precision_grads=True
        ),
        use_orig_params=use_orig_params,
    )
    model(torch.randn(4, 6)).float().square().mean().backward()
    local = sum(
        (p.grad.float() ** 2).sum() for p in model.parameters() if p.grad is not None
    )
    total = torch.as_tensor(local, dtype=torch.float32)
    torch.distributed.all_reduce(total)
    norm = model.clip_grad_norm_(1e9)
    assert norm.dtype == torch.bfloat16
    assert norm.item() == pytest.approx(total.sqrt().item(), rel=1e-2)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("transport", ["own", "c10d"])
@distributed(world_size=(2, 3))
def test_what_carries_the_norm(
    rank: int, world_size: int, transport: str, norm_type: float
) -> None:
    """The group's own transport, without a call of c10d, and the same norm."""
    group = torch.distributed.new_group()  # its ranks have not met
    with over(OWN if transport == "own" else "c10d"):
        model = fsdp(torch.nn.Linear(5, 7), process_group=group, use_orig_params=True)
        model(torch.ones(2, 5) * (rank + 1)).square().sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([torch.zeros(1), *(g.flatten() for g in grads)])
        norms = [torch.empty(()) for _ in range(world_size)]
        torch.distributed.all_gather(norms, flat.norm(norm_type), group=group)
        expected = torch.stack(norms).norm(norm_type)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            norm = model.clip_grad_norm_(1e-3, norm_type)
        calls = [e.name for e in profiler.events() if e.name.startswith("c10d::")]
        assert bool(calls) == (transport == "c10d")
        torch.testing.assert_close(norm, expected)
        del model
    torch.distributed.destroy_process_group(group)
