"""Traps around gradients: no_sync, accumulation, means, norms, padding.

What a number stands for is in tests/lint/test_traps.py.
"""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.distributed import STRATEGIES, distributed, every_strategy, varied
from helpers.impl import FSDP, MixedPrecision, assert_idle, fsdp, memory_stats
from helpers.models import CASES, DIM, OneElement, loss_of, vectors
from helpers.reference import Differential, assert_same, full_state_dict, with_model


@pytest.mark.trap(10)
@every_strategy
@pytest.mark.parametrize("how", ["nested", "backward only", "eval"])
@distributed(world_size=(2, 3))
@with_model()
def test_ways_to_enter_no_sync(differential: Differential, how: str) -> None:
    """What counts is where backward runs; contexts nest and hold several batches."""
    model = differential.model
    for _ in range(2):
        differential.zero_grad()
        if how == "nested":
            with model.no_sync():
                with model.no_sync():
                    differential.forward_backward()
                differential.forward_backward()
        elif how == "backward only":
            losses = differential.forward()
            with model.no_sync():
                for loss in losses:
                    loss.backward()
            with model.no_sync():
                losses = differential.forward()
            for loss in losses:
                loss.backward()
        else:
            with model.no_sync():
                differential.forward_backward()
                differential.evaluate()
        differential.forward_backward()
        differential.checked_step()


@pytest.mark.trap(10)
@varied(strategy=STRATEGIES)
@distributed(world_size=(2, 3))
@with_model()
def test_what_no_sync_keeps(differential: Differential, strategy: str) -> None:
    """FULL_SHARD frees parameters after such a backward, SHARD_GRAD_OP keeps them.

    The sharded gradients that were cleared are freed and not made before a reduction.
    """
    differential.train(2)
    trained = memory_stats(differential.model)
    assert trained["grad_shard_nbytes"] > 0
    differential.zero_grad()
    counts = []
    with differential.model.no_sync():
        for _ in range(3):
            before = memory_stats(differential.model)
            differential.forward_backward()
            after = memory_stats(differential.model)
            counts.append(after["num_all_gathers"] - before["num_all_gathers"])
            assert after["num_reduces"] == before["num_reduces"]
            assert after["grad_shard_nbytes"] == 0
            assert after["scratch_nbytes"] == trained["scratch_nbytes"]
    first, second, third = counts
    if strategy == "FULL_SHARD":
        assert first == second == third > 4  # four units
    else:
        assert (first, second, third) == ((4, 0, 0) if first else (0, 0, 0))
    differential.forward_backward()
    reduced = memory_stats(differential.model)
    for key in ("grad_shard_nbytes", "scratch_nbytes"):
        assert reduced[key] == trained[key], key
    assert_idle(differential.model)
    differential.check()


@pytest.mark.trap(10)
@varied(use_orig_params=[True, False], strategy=["SHARD_GRAD_OP", "FULL_SHARD"])
@pytest.mark.parametrize("how", ["in place", "load", "summon", "step"])
@distributed(world_size=2)
@with_model()
def test_parameters_change_between_no_sync_backwards(
    differential: Differential, how: str
) -> None:
    """Parameters that no_sync kept unsharded are not used after they changed."""
    model, reference = differential.model, differential.reference
    differential.forward_backward()
    for _ in range(2):
        if how == "step":
            differential.step()
            differential.zero_grad()
        with model.no_sync():
            differential.forward_backward()
        if how == "load":
            state = full_state_dict(model)
            state = {name: tensor * 0.9 for name, tensor in state.items()}
            model.load_state_dict(state)
            reference.load_state_dict(state)
        elif how == "summon":
            with FSDP.summon_full_params(model), torch.no_grad():
                for module in (model, reference):
                    module.get_parameter("blocks.1.fc1.weight").mul_(0.9)
        elif how == "step":  # both optimizers move by their momentum
            for module in (model, reference):
                for param in module.parameters():
                    param.grad = torch.zeros_like(param)
            differential.step()
            differential.zero_grad()
        else:
            differential.scale_params(0.9)
        differential.forward_backward()
        differential.check()


class _Branches(nn.Module):
    """One unit; which of its layers run changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.used = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.used:
            x = torch.tanh(self.layers[index](x))
        return x


@pytest.mark.trap(12)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=(2, 3))
def test_fresh_and_accumulated_gradients_in_one_reduction(
    strategy: str, reduce_dtype: torch.dtype, use_orig_params: bool
) -> None:
    """Some parameters of a unit bring a sum of no_sync, others a first gradient."""
    differential = Differential.of_units(
        _Branches,
        (),
        strategy=strategy,
        use_orig_params=use_orig_params,
        mixed_precision=MixedPrecision(torch.bfloat16, reduce_dtype),
    )
    both: tuple[Any, ...] = (differential.reference, differential.model.module)
    for schedule in (((0,), (0, 1), (0, 1, 2)), ((0, 1), (2,)), ((2,), (1,), (0,))):
        differential.zero_grad()
        for index, used in enumerate(schedule):
            for model in both:
                model.used = used
            if index < len(schedule) - 1:
                with differential.model.no_sync():
                    differential.forward_backward()
            else:
                differential.forward_backward()
        differential.checked_step()


class _Weighted(nn.Module):
    """Its gradient is the input, element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(37))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


def _gradient_of(model: Any, numel: int) -> Tensor:
    """Return the whole gradient of the model's only parameter. Collective."""
    (param,) = model.parameters()
    pieces: list[Any] = [None] * dist.get_world_size()
    grad = torch.zeros_like(param) if param.grad is None else param.grad
    dist.all_gather_object(pieces, grad.flatten())
    return pieces[0] if pieces[0].numel() == numel else torch.cat(pieces)[:numel]


@pytest.mark.trap(30)
@pytest.mark.trap(13)
@every_strategy
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@distributed(world_size=(2, 3, 4))
def test_mean_is_exact(
    rank: int, world_size: int, dtype: str, strategy: str, use_orig_params: bool
) -> None:
    """Gradients whose mean is a small integer: no part of the division is lost."""
    reduce_dtype = getattr(torch, dtype)
    model = fsdp(
        _Weighted().to(torch.float64 if dtype == "float64" else torch.float32),
        strategy=strategy,
        mixed_precision=MixedPrecision(reduce_dtype=reduce_dtype),
        use_orig_params=use_orig_params,
    )
    weight_dtype = next(iter(model.parameters())).dtype
    mine = torch.arange(37.0, dtype=weight_dtype) * 2.0 + (rank * 2 + 1 - world_size)
    expected = torch.arange(37.0, dtype=weight_dtype) * 2.0
    for num_backwards in (1, 2):
        model(mine).backward()
        grad = _gradient_of(model, 37)
        assert grad.dtype == weight_dtype
        tolerance = 1e-3 if (world_size, dtype) == (3, "float16") else 1e-6
        assert_same("gradient", grad, expected * num_backwards, tolerance)


@pytest.mark.trap(13)
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=(2, 3, 4))
def test_fp16_sum_does_not_overflow(strategy: str) -> None:
    """The mean fits into fp16, the sum does not; neither does small become zero."""
    for value in (30000.0, 2.0**-20):
        model = fsdp(
            _Weighted(),
            strategy=strategy,
            mixed_precision=MixedPrecision(torch.float16, torch.float16),
            use_orig_params=True,
        )
        x = torch.full((37,), value)
        # A sum of the products would overflow: only their gradient matters.
        (model.module.weight.new_zeros(()) + model(x * 0.0 + x)).backward()
        grad = _gradient_of(model, 37)
        assert_same("gradient", grad / value, torch.ones(37), 2e-3)


@pytest.mark.trap(15)
@varied(use_orig_params=[True, False])
@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
@distributed(world_size=(2, 3, 4))
@with_model(OneElement, ())
def test_norm_where_ranks_hold_nothing(
    differential: Differential, norm_type: float
) -> None:
    """One element in all: the other ranks have no gradient and take part."""
    for _ in range(2):
        differential.zero_grad()
        differential.forward_backward()
        differential.clip(0.01, norm_type)
        differential.checked_step()


@pytest.mark.trap(15)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=(2, 3))
def test_norm_with_ignored_parameters(
    rank: int, world_size: int, strategy: str, norm_type: float
) -> None:
    """They are whole on each rank: counted once, and scaled with the others."""

    def wrap(module: nn.Module) -> Any:
        return fsdp(
            module,
            ignored_states=[module.get_parameter("out.weight")],
            strategy=strategy,
            use_orig_params=True,
        )

    differential = Differential(CASES["mlp"].build, wrap, vectors, use_orig_params=True)
    batches = differential.batches()
    same = [batches[0]] * world_size  # so that local gradients are the mean
    mean, _ = differential.reference_forward(same)
    mean.backward()
    loss_of(differential.model(*same[rank])).backward()
    differential.clip(0.01, norm_type)
    differential.check()


def _padding(model: Any, tensor: Tensor) -> Tensor:
    """Return the elements of a one-segment shard that belong to no parameter."""
    ((_, _, _, _, shard_numel, padded_numel),) = model._sharded.unit.segments
    is_padding = torch.ones(padded_numel, dtype=torch.bool)
    for _, offset, numel in model._sharded.unit.slots:
        is_padding[offset : offset + numel] = False
    begin = model.rank * shard_numel
    assert tensor.numel() == shard_numel
    return tensor[is_padding[begin : begin + shard_numel]]


class _Odd(nn.Module):
    """43 elements: no world size of these tests divides that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.shift = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.shift


@pytest.mark.trap(16)
@distributed(world_size=(2, 3, 4))
@with_model(
    _Odd,
    (),
    use_orig_params=False,
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    tolerance=1e-3,
)
def test_padding_stays_zero(differential: Differential) -> None:
    """In parameters, gradients and reused gradient memory."""
    (flat,) = differential.model.parameters()
    num_padding = torch.tensor(_padding(differential.model, flat.detach()).numel())
    dist.all_reduce(num_padding)
    assert num_padding > 0
    for mode in ("sync", "no_sync", "clip", "sync"):
        differential.zero_grad(set_to_none=mode == "sync")
        differential.accumulate(2 if mode == "no_sync" else 1, no_sync=True)
        if mode == "clip":
            differential.clip(1e-3)
        assert not _padding(differential.model, flat.grad).any()
        differential.step()
        assert not _padding(differential.model, flat.detach()).any()
        differential.check()


@pytest.mark.trap(18)
@pytest.mark.parametrize("what", ["data", "grad", "grad none", "grad data"])
@varied(strategy=STRATEGIES)
@distributed(world_size=(2, 3))
@with_model()
def test_tensors_replaced_between_backwards(
    differential: Differential, what: str
) -> None:
    """What the user put in place of a shard or a gradient is read and added to."""
    both = (differential.model, differential.reference)
    differential.train(1)
    for scale in (0.5, 3.0):
        differential.zero_grad()
        differential.forward_backward()
        for model in both:
            for index, param in enumerate(model.parameters()):
                if what == "data":
                    param.data = param.data * scale
                elif param.grad is None:
                    continue
                elif what == "grad":
                    param.grad.mul_(0.5)
                    param.grad = param.grad * scale
                elif what == "grad data":
                    param.grad.data = param.grad * scale
                elif index % 2:
                    param.grad = None
        differential.forward_backward()
        differential.checked_step()


@pytest.mark.trap(11)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float16])
@distributed(world_size=(2, 3))
def test_accumulation_outside_no_sync_is_in_the_shards_dtype(
    reduce_dtype: torch.dtype, use_orig_params: bool
) -> None:
    """Sixty small gradients on a large one, which a 16-bit sum would lose."""
    model = fsdp(
        _Weighted(),
        mixed_precision=MixedPrecision(reduce_dtype=reduce_dtype),
        use_orig_params=use_orig_params,
    )
    model(torch.full((37,), 4096.0)).backward()
    for _ in range(60):
        model(torch.ones(37)).backward()
    assert_same("gradient", _gradient_of(model, 37), torch.full((37,), 4156.0), 1e-6)
