"""offload_activations() on the fake CUDA: the same bits, less memory.

Copies and computation are late at random there, and memory that nobody holds is
poisoned. Every run is compared with one that offloads nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

import fsdp_c
from fakecuda.device import needs_cuda, schedules, set_schedule
from fsdp_c.tools.plan import ModelSource, Settings, plan_model
from fsdp_c.tools.plan._trace import Inputs
from helpers.distributed import distributed
from helpers.impl import CPUOffload, MixedPrecision, fsdp

pytestmark = needs_cuda

BATCH, WIDTH, DEPTH = 16, 32, 5
ROW = BATCH * WIDTH * 4  # bytes of a block's input
MIN_BYTES = 1024  # the norm's statistics are smaller
# What a block saves, in rows: its input, the norm's output, and before and after gelu.
SAVED = (1, 1, 4, 4)
BLOCK = sum(SAVED) * ROW


class Block(nn.Module):
    """What a transformer block does behind its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Checkpointed(Block):
    """A block that recomputes itself."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


class CheckpointedReentrant(Checkpointed):
    """Likewise, in a backward of its own."""

    use_reentrant = True


class Twice(nn.Module):
    """Blocks that all run, and then run again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x


def _wrapped(model: nn.Module, door: str, **options: Any) -> Any:
    if door == "fsdp":
        return fsdp(
            model, units={Block, Checkpointed, CheckpointedReentrant}, **options
        )
    for module in list(model.modules()):
        if isinstance(module, Block):
            fsdp_c.fully_shard(module, **options)
    return fsdp_c.fully_shard(model, **options)


def _chain(door: str, kind: type[Block] = Block, **options: Any) -> Any:
    torch.manual_seed(0)
    return _wrapped(nn.Sequential(*(kind() for _ in range(DEPTH))), door, **options)


def _batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, WIDTH, generator=generator, device="cpu").to("cuda")


def _step(model: Any, seed: int = 0) -> None:
    x = _batch(seed).requires_grad_()  # all blocks recompute
    model(x).square().mean().backward()


def _grads(model: nn.Module) -> list[Tensor]:
    grads = [param.grad for param in model.parameters()]
    locals_ = [getattr(grad, "_local_tensor", grad) for grad in grads]
    return [grad.detach().cpu().clone() for grad in locals_ if grad is not None]


Run = Callable[[Any], object]


def _compare(
    make: Callable[[], Any], run: Run = _step, seeds: int = 3, **settings: Any
) -> dict[str, int]:
    """Train with and without; return the stats of the last model."""
    set_schedule(0, 1.0)
    plain = make()
    expected = []
    for _ in range(2):
        run(plain)
        expected.append(_grads(plain))
    assert fsdp_c.memory_stats(plain)["num_downloads"] == 0
    for _ in schedules(seeds):
        model = make()
        fsdp_c.offload_activations(model, **{"min_bytes": MIN_BYTES, **settings})
        for grads in expected:
            run(model)
            actual = _grads(model)
            assert len(actual) == len(grads) > 0
            for mine, theirs in zip(actual, grads, strict=True):
                assert torch.equal(mine, theirs)
        stats = fsdp_c.memory_stats(model)
        assert stats["offloaded_nbytes"] == 0
    return stats


def _counts(stats: dict[str, int]) -> tuple[int, int]:
    return stats["num_downloads"], stats["num_uploads"]


@pytest.mark.parametrize("door", ["fsdp", "fully_shard"])
@pytest.mark.parametrize("keep_last", [1, 2])
@distributed(world_size=2, device="cuda")
def test_gradients_are_the_same(door: str, keep_last: int) -> None:
    """All blocks but the last are copied, once; the batch, which is alive, is not."""
    stats = _compare(lambda: _chain(door), keep_last=keep_last)
    copied = DEPTH - keep_last
    num_copies = 2 * (copied * len(SAVED) - 1)
    assert _counts(stats) == (num_copies, num_copies)
    assert stats["peak_offloaded_nbytes"] == copied * BLOCK - ROW


@pytest.mark.parametrize("door", ["fsdp", "fully_shard"])
@distributed(world_size=2, device="cuda")
def test_memory_of_the_device(door: str) -> None:
    """The last block's activations stay; in a step two blocks' are there at once."""
    factor = 16  # so that activations are more than gradients
    held, peaks = [], []
    for enabled in (False, True):
        set_schedule(0, 0.0)
        model = _chain(door)
        fsdp_c.offload_activations(model, enabled, min_bytes=factor * MIN_BYTES)
        for seed in range(3):
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # blocks are as large as what is asked for
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = model(_batch(seed).repeat(factor, 1)).square().mean()
            after = torch.cuda.memory_allocated()
            loss.backward()
            del loss
            peak = torch.cuda.max_memory_allocated()
            for param in model.parameters():
                param.grad = None
        held.append(after - before)
        peaks.append(peak - before)
        del model
    assert held[0] - held[1] == factor * ((DEPTH - 1) * BLOCK - ROW)
    assert peaks[0] - peaks[1] >= factor * (DEPTH - 3) * BLOCK


@pytest.mark.parametrize("keep_last", [1, 2])
@distributed(world_size=2, device="cuda")
def test_what_a_plan_says(keep_last: int) -> None:
    """The bytes that leave, and the host memory for them."""

    def make(_batch: int, _sequence: int) -> tuple[nn.Module, Inputs]:
        blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        return blocks, Inputs((torch.zeros(BATCH, WIDTH),))

    plan = plan_model(
        ModelSource("chain", make),
        [2],
        settings=Settings(offload_keep_last=keep_last, offload_min_bytes=MIN_BYTES),
        wrap="Block",
    )
    model = _chain("fsdp")
    fsdp_c.offload_activations(model, min_bytes=MIN_BYTES, keep_last=keep_last)
    _step(model)
    stats = fsdp_c.memory_stats(model)
    assert plan.ranks[0].offloaded_nbytes == stats["peak_offloaded_nbytes"]
    assert plan.ranks[0].pinned_nbytes == stats["pinned_nbytes"]


@distributed(world_size=2, device="cuda")
def test_host_memory_is_used_again() -> None:
    model = _chain("fsdp")
    fsdp_c.offload_activations(model, min_bytes=MIN_BYTES)
    _step(model)
    first = fsdp_c.memory_stats(model)["pinned_nbytes"]
    for seed in range(4):
        _step(model, seed)
        assert fsdp_c.memory_stats(model)["pinned_nbytes"] == first > 0


@pytest.mark.parametrize("door", ["fsdp", "fully_shard"])
@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedReentrant])
@distributed(world_size=2, device="cuda")
def test_checkpointing_inside(door: str, kind: type[Block]) -> None:
    """Only the inputs of the blocks are copied."""
    stats = _compare(lambda: _chain(door, kind))
    num_copies = 2 * (DEPTH - 2)  # not the batch, not the last one
    assert _counts(stats) == (num_copies, num_copies)
    assert stats["peak_offloaded_nbytes"] == (DEPTH - 2) * ROW


class Around(nn.Module):
    """Checkpoints its units from the outside."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("door", ["fsdp", "fully_shard"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(world_size=2, device="cuda")
def test_checkpointing_around_units(door: str, use_reentrant: bool) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return _wrapped(Around(use_reentrant), door)

    stats = _compare(make)
    # Without reentrance an input is saved before its unit begins.
    num_copies = 2 * (DEPTH - 2)
    assert _counts(stats) == (num_copies, num_copies)


@pytest.mark.parametrize("impl", list(CheckpointImpl))
@distributed(world_size=2, device="cuda")
def test_checkpoint_wrapper(impl: CheckpointImpl) -> None:
    def make() -> Any:
        model = _chain("fsdp")
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, impl),
            check_fn=lambda module: isinstance(module, Block),
        )
        return model

    stats = _compare(make)
    assert _counts(stats) == (2 * (DEPTH - 2), 2 * (DEPTH - 2))


@distributed(world_size=2, device="cuda")
def test_mixed_precision() -> None:
    """The cast batch is alive while forward runs: it is not copied either."""
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    stats = _compare(
        lambda: _chain("fsdp", mixed_precision=precision), min_bytes=MIN_BYTES // 2
    )
    num_copies = 2 * ((DEPTH - 1) * len(SAVED) - 1)
    assert _counts(stats) == (num_copies, num_copies)


@distributed(world_size=2, device="cuda")
def test_beside_offloaded_parameters() -> None:
    """Both use the lanes of uploads and downloads."""
    offload = CPUOffload(offload_params=True)
    stats = _compare(lambda: _chain("fsdp", cpu_offload=offload, use_orig_params=True))
    num_copies = 2 * ((DEPTH - 1) * len(SAVED) - 1)
    assert _counts(stats) == (num_copies, num_copies)


def _accumulate(model: Any) -> None:
    with model.no_sync():
        _step(model, 1)
    _step(model, 2)


def _two_forwards(model: Any) -> None:
    """Backwards in the order of the forwards, which is the wrong one to prefetch."""
    losses = [model(_batch(seed)).square().mean() for seed in (1, 2)]
    for loss in losses:
        loss.backward()


def _one_backward(model: Any) -> None:
    losses = [model(_batch(seed)).square().mean() for seed in (1, 2)]
    torch.stack(losses).sum().backward()


def _backward_twice(model: Any) -> None:
    loss = model(_batch(1)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def _evaluate_between(model: Any) -> None:
    """A forward without gradients, between a forward and its backward."""
    loss = model(_batch(1)).square().mean()
    with torch.no_grad():
        model(_batch(2))
    loss.backward()


RUNS = {
    run.__name__: run
    for run in (
        _accumulate,
        _two_forwards,
        _one_backward,
        _backward_twice,
        _evaluate_between,
    )
}


@pytest.mark.parametrize("name", RUNS)
@distributed(world_size=2, device="cuda")
def test_other_orders(name: str) -> None:
    stats = _compare(lambda: _chain("fsdp", use_orig_params=True), RUNS[name])
    assert stats["num_downloads"] > 0
    assert stats["num_uploads"] >= stats["num_downloads"]


@distributed(world_size=2, device="cuda")
def test_units_that_run_twice() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return _wrapped(Twice(), "fsdp")

    stats = _compare(make)
    num_copies = 2 * ((2 * DEPTH - 1) * len(SAVED) - 1)
    assert _counts(stats) == (num_copies, num_copies)


@distributed(world_size=2, device="cuda")
def test_a_forward_that_fails_leaves_nothing() -> None:
    model = _chain("fsdp")
    fsdp_c.offload_activations(model, min_bytes=MIN_BYTES)
    _step(model)
    pinned = fsdp_c.memory_stats(model)["pinned_nbytes"]

    def fail(*_: Any) -> None:
        raise ValueError("meant")

    hook = model.module[3].register_forward_pre_hook(fail)
    for _ in range(3):
        with pytest.raises(ValueError, match="meant"):
            _step(model)
    hook.remove()
    gc.collect()
    _step(model)
    torch.cuda.synchronize()
    stats = fsdp_c.memory_stats(model)
    assert stats["offloaded_nbytes"] == 0
    assert stats["pinned_nbytes"] == pinned


@distributed(world_size=2, device="cuda")
def test_saved_tensors_that_change_are_an_error() -> None:
    """As without the offload, of tensors that are copied and that stay."""
    for enabled, min_bytes in ((False, 1), (True, 1), (True, 1 << 30)):
        model = _chain("fsdp")
        fsdp_c.offload_activations(model, enabled, min_bytes=min_bytes)
        kept: list[Tensor] = []
        hook = model.module[1].module.up.register_forward_hook(
            lambda _module, _args, output, kept=kept: kept.append(output)
        )
        loss = model(_batch(1)).square().mean()
        with torch.no_grad():
            kept[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        hook.remove()
        kept.clear()
        fsdp_c.reset(model)
        _step(model)


@distributed(world_size=2, device="cuda")
def test_forwards_that_save_nothing_here() -> None:
    """Without gradients, switched off, or inside somebody else's hooks."""
    model = _chain("fsdp")
    fsdp_c.offload_activations(model, min_bytes=MIN_BYTES)
    with torch.no_grad():
        model(_batch(1))
    with torch.autograd.graph.save_on_cpu():
        model(_batch(1)).square().mean().backward()
    fsdp_c.offload_activations(model, False)
    _step(model)
    stats = fsdp_c.memory_stats(model)
    assert _counts(stats) == (0, 0)
    assert stats["pinned_nbytes"] == 0
    fsdp_c.offload_activations(model, min_bytes=MIN_BYTES)
    _step(model)
    assert _counts(fsdp_c.memory_stats(model)) != (0, 0)


@distributed(world_size=2, device="cuda")
def test_gradients_of_gradients() -> None:
    """A penalty on the gradient of the input."""

    def run(model: Any) -> None:
        x = _batch(1).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        grad.square().sum().backward()

    def make() -> Any:
        return _chain("fsdp", strategy="NO_SHARD", use_orig_params=True)

    assert _compare(make, run)["num_downloads"] > 0


@distributed(world_size=2, device="cuda")
def test_shards_stay_in_host_memory() -> None:
    """To move them is an error of the next call, as in torch; to() takes it back."""
    model = fsdp(nn.Linear(4, 4), cpu_offload=CPUOffload(offload_params=True))
    x = torch.ones(2, 4, device="cuda")
    model(x).sum().backward()
    model.zero_grad()
    model.cuda()
    assert all(param.device == torch.device("cpu") for param in model.parameters())
    for call in (lambda: model(x), model.state_dict):
        with pytest.raises(RuntimeError, match="offloading enabled has parameters on"):
            call()
    model.to("cpu", torch.float64)
    model(x.double()).sum().backward()


@distributed(world_size=2, device="cuda")
def test_shards_that_were_made_on_the_device() -> None:
    """Torch's words, all parameters named; memory of the host is what they need."""
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    fsdp_c.fully_shard(model, offload_policy=CPUOffloadPolicy())
    x = torch.ones(2, 4, device="cuda")
    model.to_empty(device="cuda")
    words = (
        r'to_empty\(device="cpu"\). Found following parameters on non-CPU device: '
        r"\[\('0.weight', device\(type='cuda'.*'0.bias'.*'1.weight'"
    )
    with pytest.raises(RuntimeError, match=words):
        model(x)
    model.to_empty(device="cpu")
    model(x).sum().backward()
