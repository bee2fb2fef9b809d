"""An encoder and a decoder, as T5: what is tied, and bf16 on three ranks.

One embedding serves the encoder, the decoder and the head; the bias of the first block
goes through all of them. With gradients reduced in bf16 on three ranks, weights differ
from torch's FSDP1 after some steps: that one halves, sums in the ring's order and
divides by 1.5, and rounds each time; here the sum is divided once, in fp32.
"""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional

from helpers.distributed import distributed
from helpers.impl import FSDP, MixedPrecision, ShardingStrategy, fsdp
from helpers.reference import gather_orig
from helpers.seeds import seeded
from programs.unsharded import train_beside

DIM, VOCAB = 16, 24


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class _Attention(nn.Module):
    def __init__(self, *, has_bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(DIM, DIM, bias=False) for _ in range(4)
        )
        self.relative = nn.Embedding(8, 1) if has_bias else None

    def forward(
        self, x: Tensor, memory: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.relative is not None:
            place = torch.arange(x.shape[1])
            bias = self.relative((place[:, None] - place).clamp(-4, 3) + 4)[..., 0]
        scores = self.q(x) @ self.k(memory).transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        return self.o(scores.softmax(-1) @ self.v(memory)), bias


class _Block(nn.Module):
    def __init__(self, *, is_first: bool, is_decoder: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_Norm() for _ in range(2 + is_decoder))
        self.attention = _Attention(has_bias=is_first)
        self.cross = _Attention(has_bias=False) if is_decoder else None
        self.inner = nn.Linear(DIM, 2 * DIM, bias=False)
        self.outer = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(
        self, x: Tensor, bias: Tensor | None, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        normed = self.norms[0](x)
        mixed, bias = self.attention(normed, normed, bias)
        x = x + mixed
        if self.cross is not None:
            assert memory is not None
            x = x + self.cross(self.norms[1](x), memory, None)[0]
        return x + self.outer(self.inner(self.norms[-1](x)).relu()), bias


class _T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCAB, DIM)
        self.encoder, self.decoder = (
            nn.ModuleList(
                _Block(is_first=i == 0, is_decoder=is_decoder) for i in range(2)
            )
            for is_decoder in (False, True)
        )
        self.norm = _Norm()
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, bias = self.shared(source), None
        for block in self.encoder:
            x, bias = block(x, bias, None)
        y, bias = self.shared(target), None
        for block in self.decoder:
            y, bias = block(y, bias, x)
        return self.head(self.norm(y) * DIM**-0.5)


def _build(dtype: torch.dtype) -> _T5:
    torch.manual_seed(0)
    model = _T5()
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.2)
    return model.to(dtype)


def _tokens(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (4, 6), generator=seeded(seed))


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    seed = 100 * step + rank
    logits = model(_tokens(seed), _tokens(seed + 10)).double()
    return functional.cross_entropy(logits.flatten(0, 1), _tokens(seed + 20).flatten())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=3)
def test_weights(strategy: str) -> None:
    """In fp64."""
    reference = _build(torch.float64)
    model = fsdp(
        _build(torch.float64), strategy=strategy, units={_Block}, use_orig_params=True
    )
    train_beside(reference, model, _loss, lr=0.01)


@distributed(world_size=3)
def test_reduction_in_bf16(rank: int, world_size: int) -> None:
    """The gradient is nearer to the mean of the ranks' gradients than FSDP1's."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    low = _build(torch.bfloat16)  # what the sharded model computes with
    shapes = {name: p.shape for name, p in low.named_parameters()}
    means = {name: torch.zeros(shape).double() for name, shape in shapes.items()}
    for r in range(world_size):
        low.zero_grad()
        _loss(low, 0, r).backward()
        for name, param in low.named_parameters():
            assert param.grad is not None
            means[name] += param.grad.double() / world_size

    def error_of(wrapper: type[nn.Module]) -> float:
        model = wrapper(
            _build(torch.float32),
            auto_wrap_policy=ModuleWrapPolicy({_Block}),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            mixed_precision=precision,
            use_orig_params=True,
            device_id=torch.get_default_device(),
        )
        _loss(model, 0, rank).backward()
        _, grads = gather_orig(model, shapes)
        return sum(
            float((grads[n].cpu() - means[n].cpu()).square().sum()) for n in shapes
        )

    mine = error_of(FSDP)
    theirs = error_of(torch_fsdp.FullyShardedDataParallel)
    assert 0 < mine <= theirs, (mine, theirs)
