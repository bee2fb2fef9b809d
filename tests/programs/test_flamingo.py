"""A frozen language model with trainable cross-attention, as open_flamingo.

Each part is wrapped by hand, twice, and nothing around them is: every part is a root of
its own, and decoders and cross-attention are registered in two places. Decoders are
either frozen, so they pass gradients on, or only left out of the optimizer, so their
gradients pile up. An update takes two steps, a step two backwards, of two data sets
with different weights. After each step the gradient of most embeddings is cleared, and
each part clips by its own norm. With checkpointing, a layer that holds two roots runs
again in backward. HYBRID_SHARD runs over groups of one rank, which torch's FSDP1 does
not reduce over, and over 2 x 2 ranks.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp.wrap import enable_wrap, wrap
from torch.nn import functional

from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import hybrid_groups
from helpers.impl import FSDP, MixedPrecision, ShardingStrategy
from helpers.reference import assert_same_tensors, clean_name
from helpers.seeds import seeded
from programs.unsharded import check_weights, draw, mean_over_ranks

DIM, VOCAB = 8, 12
NEW_TOKENS = [10, 11]  # the only rows of the embedding that are trained
STEPS_PER_UPDATE = 2
LOSS_WEIGHTS = (0.2, 1.0)  # by data set


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.inner = nn.Linear(DIM, 2 * DIM)
        self.outer = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(functional.gelu(self.inner(self.norm(x))))


class _GatedCrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.kv = nn.Linear(DIM, 2 * DIM, bias=False)
        self.gate = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor, media: Tensor) -> Tensor:
        k, v = self.kv(media).chunk(2, -1)
        scores = self.q(self.norm(x)) @ k.transpose(-1, -2)
        return x + scores.softmax(-1) @ v * self.gate.tanh()


class _Layer(nn.Module):
    def __init__(self, cross: nn.Module | None, decoder: nn.Module) -> None:
        super().__init__()
        self.cross = cross
        self.decoder = decoder
        self.media: Tensor | None = None  # set before forward

    def forward(self, x: Tensor) -> Tensor:
        if self.cross is not None:
            x = self.cross(x, self.media)
        return self.decoder(x)


class _Flamingo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Linear(DIM, DIM)
        self.perceiver = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU())
        self.embedding = nn.Embedding(VOCAB, DIM)
        crosses = [_GatedCrossAttention(), None, _GatedCrossAttention()]
        self.decoders = nn.ModuleList(_Decoder() for _ in crosses)
        self.crosses = nn.ModuleList(crosses)  # type: ignore[arg-type]
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.make_layers()

    def make_layers(self) -> None:
        pairs = zip(self.crosses, self.decoders, strict=True)
        self.layers = nn.ModuleList(_Layer(*pair) for pair in pairs)

    def plain_layers(self) -> list[_Layer]:
        return [module for module in self.modules() if isinstance(module, _Layer)]

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.vision(image)
        media = self.perceiver(seen)
        x = self.embedding(tokens)
        for layer in self.plain_layers():
            layer.media = media
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _trainable(model: _Flamingo) -> list[nn.Module]:
    crosses = [cross for cross in model.crosses if cross is not None]
    return [model.perceiver, model.embedding, *crosses]


def _build(*, thawed: bool = False) -> _Flamingo:
    torch.manual_seed(0)
    model = _Flamingo().double()
    model.requires_grad_(False)
    model.decoders.requires_grad_(thawed)
    for part in _trainable(model):
        part.requires_grad_(True)
    return model


def _wrap(
    model: _Flamingo, checkpointing: str, wrapper: Any = FSDP, **kwargs: Any
) -> _Flamingo:
    with enable_wrap(wrapper_cls=wrapper, use_orig_params=True, **kwargs):
        for name in ("vision", "perceiver", "embedding", "head"):
            setattr(model, name, wrap(wrap(getattr(model, name))))
        for modules in (model.decoders, model.crosses):
            for i, module in enumerate(modules):
                modules[i] = None if module is None else wrap(wrap(module))
    model.make_layers()
    again: Any = lambda module: checkpoint_wrapper(  # noqa: E731
        module, checkpoint_impl=CheckpointImpl.NO_REENTRANT
    )
    if checkpointing in ("inside", "both"):
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=again,
            check_fn=lambda m: isinstance(m, (_Decoder, _GatedCrossAttention)),
        )
    if checkpointing in ("around", "both"):
        model.layers = nn.ModuleList(again(layer) for layer in model.layers)
    return model


def _loss(model: nn.Module, step: int, rank: int, data: int) -> Tensor:
    seed = 100 * step + 10 * rank + data
    generator = seeded(seed)
    tokens = torch.randint(0, VOCAB, (2, 6), generator=generator)
    dtype = next(model.parameters()).dtype
    logits = model(draw(2, 4, DIM, seed=seed).to(dtype), tokens[:, :-1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    loss = functional.cross_entropy(logits, tokens[:, 1:].flatten())
    return loss * LOSS_WEIGHTS[data] / STEPS_PER_UPDATE


def _optimizer(model: _Flamingo) -> torch.optim.Optimizer:
    perceiver, embedding, *crosses = _trainable(model)
    decayed = [param for cross in crosses for param in cross.parameters()]
    others = [*perceiver.parameters(), *embedding.parameters()]
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=0.02,
    )


def _clear_old_rows(embedding: Any) -> None:
    old = torch.ones(VOCAB, dtype=torch.bool)
    old[NEW_TOKENS] = False
    embedding.weight.grad[old] = 0.0


def _update(
    model: _Flamingo, backward: Callable[[int, int], None], wrapper: Any = None
) -> None:
    """Train; ``backward`` takes a step and a data set, None wraps nothing."""
    optimizer = _optimizer(model)
    for step in range(3 * STEPS_PER_UPDATE):
        for data in range(2):
            backward(step, data)
        if wrapper is None:
            _clear_old_rows(model.embedding)
        else:
            with wrapper.summon_full_params(model.embedding, with_grads=True):
                _clear_old_rows(model.embedding)
        for part in _trainable(model):
            if wrapper is None:
                nn.utils.clip_grad_norm_(part.parameters(), 0.1)
            else:
                part.clip_grad_norm_(0.1)
        if (step + 1) % STEPS_PER_UPDATE == 0:
            optimizer.step()
            optimizer.zero_grad()


def _unsharded_backward(
    model: _Flamingo, context: Callable[[], Any] = contextlib.nullcontext
) -> Callable[[int, int], None]:
    def backward(step: int, data: int) -> None:
        with context():
            loss = mean_over_ranks(lambda rank: _loss(model, step, rank, data))
        loss.backward()

    return backward


def _train(rank: int, model: _Flamingo, *, thawed: bool) -> None:
    reference = _build(thawed=thawed)
    _update(model, lambda step, data: _loss(model, step, rank, data).backward(), FSDP)
    _update(reference, _unsharded_backward(reference))
    check_weights(model, reference)
    actual, gradients = _gradients(model), _gradients(reference)
    assert bool(gradients) == thawed  # of the decoders, which nobody cleared
    assert_same_tensors("gradient", actual, gradients, 1e-9)


def _gradients(model: nn.Module, wrapper: Any = FSDP) -> dict[str, Tensor]:
    with wrapper.summon_full_params(model, with_grads=True, writeback=False):
        return {
            clean_name(name): param.grad.double().clone()
            for name, param in model.named_parameters()
            if param.grad is not None
        }


@pytest.mark.parametrize("thawed", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "inside", "around", "both"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=2)
def test_weights(rank: int, strategy: str, checkpointing: str, *, thawed: bool) -> None:
    """With activations kept or computed again."""
    model = _build(thawed=thawed)
    strategy_kind = ShardingStrategy[strategy]
    _train(
        rank,
        _wrap(model, checkpointing, sharding_strategy=strategy_kind),
        thawed=thawed,
    )


@pytest.mark.only_full
@pytest.mark.parametrize("checkpointing", ["none", "both"])
@distributed(world_size=(2, 4))
def test_hybrid_shard(rank: int, world_size: int, checkpointing: str) -> None:
    """Over groups of one rank and of two."""
    with hybrid_groups(2, world_size // 2) as groups:
        _train_hybrid(rank, groups, checkpointing)


def _train_hybrid(rank: int, groups: Any, checkpointing: str) -> None:
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    model = _wrap(_build(thawed=True), checkpointing, process_group=groups, **options)
    _train(rank, model, thawed=True)


def _autocast() -> Any:
    return torch.autocast(TEST_DEVICE, torch.bfloat16, cache_enabled=False)


def _wrap_low(checkpointing: str, wrapper: Any, groups: Any) -> _Flamingo:
    """Weights in fp32, gradients reduced in bf16; HYBRID_SHARD over ``groups``."""
    hybrid, full = ShardingStrategy.HYBRID_SHARD, ShardingStrategy.FULL_SHARD
    return _wrap(
        _build(thawed=True).float(),
        checkpointing,
        wrapper,
        sharding_strategy=hybrid if groups else full,
        process_group=groups,
        mixed_precision=MixedPrecision(
            param_dtype=torch.float32, reduce_dtype=torch.bfloat16
        ),
        device_id=torch.get_default_device(),
    )


@pytest.mark.parametrize("checkpointing", ["none", "both"])
@distributed(world_size=(2, 4))
def test_bf16(rank: int, world_size: int, checkpointing: str) -> None:
    """Weights in fp32, autocast, and gradients reduced in bf16, over 2 or 2 x 2 ranks.

    A rank rounds its gradient to bf16, and each of the two reductions rounds the sum.
    Rounding changes a number by 2 ** -9 of it at most. The first backward's gradients
    of a rank are those of the unsharded model, so the error has that bound.
    """
    reference = _build(thawed=True).float()
    means: dict[str, Tensor] = {}
    sizes: dict[str, Tensor] = {}  # means of absolute values
    for r, data in itertools.product(range(world_size), range(2)):
        reference.zero_grad()
        with _autocast():
            loss = _loss(reference, 0, r, data)
        loss.backward()
        for name, gradient in _gradients(reference).items():
            means[name] = means.get(name, 0) + gradient / world_size
            sizes[name] = sizes.get(name, 0) + gradient.abs() / world_size
    bounds = {name: 3.1 * 2**-9 * float(size.max()) for name, size in sizes.items()}

    def error_of(wrapper: Any, groups: Any) -> float:
        model = _wrap_low(checkpointing, wrapper, groups)
        for data in range(2):
            with _autocast():
                loss = _loss(model, 0, rank, data)
            loss.backward()
        errors = _gradients(model, wrapper)
        assert errors.keys() == means.keys()
        for name, mean in means.items():
            errors[name] -= mean
            largest = float(errors[name].abs().max())
            assert largest <= bounds[name], (name, largest, bounds[name])
        return sum(float(error.square().sum()) for error in errors.values())

    with hybrid_groups(2, 2) if world_size == 4 else contextlib.nullcontext() as groups:
        mine = error_of(FSDP, groups)
        theirs = error_of(torch_fsdp.FullyShardedDataParallel, groups)
    assert 0 < mine <= theirs, (mine, theirs)


@pytest.mark.parametrize(
    "checkpointing", [pytest.param("none", marks=pytest.mark.only_full), "both"]
)
@distributed(world_size=4)
def test_weights_in_bf16(rank: int, checkpointing: str) -> None:
    """After AdamW's steps FSDP1's bit for bit, as near to fp64 as unsharded in bf16.

    Each reduction is of two numbers, so there is one order and one rounding.
    """
    exact, low = _build(thawed=True), _build(thawed=True).float()
    _update(exact, _unsharded_backward(exact))
    _update(low, _unsharded_backward(low, _autocast))

    def weights(model: nn.Module, wrapper: Any) -> dict[str, Tensor]:
        with wrapper.summon_full_params(model, writeback=False):
            named = list(model.named_parameters())
            return {clean_name(name): p.detach().double().clone() for name, p in named}

    def trained(wrapper: Any, groups: Any) -> dict[str, Tensor]:
        model = _wrap_low(checkpointing, wrapper, groups)

        def backward(step: int, data: int) -> None:
            with _autocast():
                loss = _loss(model, step, rank, data)
            loss.backward()

        _update(model, backward, wrapper)
        return weights(model, wrapper)

    with hybrid_groups(2, 2) as groups:
        mine = trained(FSDP, groups)
        theirs = trained(torch_fsdp.FullyShardedDataParallel, groups)
    assert_same_tensors("beside FSDP1", mine, theirs, 0.0)
    expected = dict(exact.named_parameters())

    unsharded = dict(low.named_parameters())
    with torch.no_grad():
        errors = [
            sum(float((found[n] - p).square().sum()) for n, p in expected.items())
            for found in (mine, unsharded)
        ]
    assert 0 < errors[0] <= 1.1 * errors[1]
