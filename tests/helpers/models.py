"""Small models, one per property that FSDP has to keep.

Every model is deterministic under `torch.manual_seed`, maps tensors to any nested
output, and is small enough for thousands of steps. `CASES` lists them with their
inputs and with the classes that a wrapping policy makes units of.
"""

from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]
BATCH = 4
DIM = 6
VOCAB = 11


class Block(nn.Module):
    """Two linear layers with a residual."""

    def __init__(self, dim: int = DIM, hidden: int = 10, *, bias: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(x)))


class Chain(nn.Module):
    """Modules that run in turn, and nothing else."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class MLP(nn.Module):
    """Blocks between two linear layers that stay in the root unit."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.out = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inp(x))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class WithEmpty(MLP):
    """Beside the other parameters one of no elements, as of an adapter of rank 0."""

    def __init__(self) -> None:
        super().__init__(1)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x) + self.empty.sum()
        return output


class OneElement(nn.Module):
    """A single parameter of one element: all other ranks hold an empty shard."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.25]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Uneven(nn.Module):
    """Parameters larger and smaller than a shard, of awkward sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = OneElement()
        self.gain = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))
        self.small = Block(DIM, 1, bias=False)
        self.big = nn.Linear(DIM, 37)
        self.out = nn.Linear(37, 7)
        self.last = nn.Linear(7, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.small(self.one(x))
        x = torch.cat([x[:, :3] * self.gain, x[:, 3:]], dim=1)
        return self.last(torch.sigmoid(self.out(torch.tanh(self.big(x)))))


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        heads = self.qkv(x).view(batch, time, 3, 2, dim // 2).permute(2, 0, 3, 1, 4)
        scores = heads[0] @ heads[1].transpose(-1, -2) / (dim // 2) ** 0.5
        mask = torch.ones(time, time, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        mixed = (weights @ heads[2]).transpose(1, 2).reshape(batch, time, dim)
        return self.proj(mixed)


class TransformerBlock(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A language model whose head shares the embedding, both in the root unit."""

    def __init__(self, num_blocks: int = 2, dim: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.position = nn.Parameter(torch.randn(5, dim) * 0.1)
        self.blocks = nn.ModuleList(TransformerBlock(dim) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TiedBlock(nn.Module):
    """Two layers of one unit that are one parameter; biases differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Tied(nn.Module):
    """A tied block between other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.tied = TiedBlock()
        self.out = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.tied(self.inp(x)))


class CalledTwice(nn.Module):
    """A unit that runs twice in one forward, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Block()
        self.between = Block()
        self.out = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        x = self.between(x)
        return self.out(self.shared(x))


class Unused(nn.Module):
    """An unused parameter inside a used unit, and a unit that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.never = Block()
        self.last = Block()
        self.first.extra = nn.Parameter(torch.randn(5))
        self.spare = nn.Parameter(torch.randn(3, 3))
        self.out = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.last(self.first(x)))


class Frozen(nn.Module):
    """Frozen and trainable parameters in one unit, and a frozen unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.mixed = Block()
        self.frozen = Block()
        self.out = nn.Linear(DIM, 2)
        self.mixed.fc1.weight.requires_grad_(False)
        self.mixed.fc2.bias.requires_grad_(False)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.frozen(self.mixed(self.inp(x))))


class FrozenUnits(Chain):
    """Whole units are frozen, the first one that runs among them."""

    def __init__(self) -> None:
        super().__init__(Block() for _ in range(4))
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)


class ScalarBlock(Block):
    """A block whose own forward uses its scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate


class ScalarNet(nn.Module):
    """Scalars in the root and in a unit; each is used where it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.block = ScalarBlock()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) / self.temperature


class MixedDtype(nn.Module):
    """fp32 and bf16 parameters in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(DIM, DIM)
        self.low = nn.Linear(DIM, DIM).to(torch.bfloat16)
        self.out = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        low = self.low(self.single(x).to(torch.bfloat16))
        return self.out(low.to(x.dtype))


class ConvNet(nn.Module):
    """Convolutions with batch norm, which keeps no running statistics.

    tanh stands between: a norm takes a bias out, whose gradient would be rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 3, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(3, track_running_stats=False)
        self.conv2 = nn.Conv2d(3, 5, 3, stride=2, bias=False)
        self.norm2 = nn.BatchNorm2d(5, track_running_stats=False)
        self.out = nn.Linear(5, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.norm1(torch.tanh(self.conv1(image))))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.out(x.mean(dim=(2, 3)))


@dataclass
class Result:
    """An output as a dataclass, with a part that is no tensor."""

    hidden: Tensor
    logits: Tensor
    label: str = "x"


Pair = namedtuple("Pair", ["hidden", "logits"])

OUTPUT_KINDS = ("tuple", "list", "dict", "namedtuple", "dataclass", "nested", "view")


def _pack(kind: str, hidden: Tensor, logits: Tensor) -> Any:
    """Return both tensors in the shape ``kind``."""
    packed: dict[str, Callable[[], Any]] = {
        "tuple": lambda: (hidden, logits),
        "list": lambda: [hidden, logits],
        "dict": lambda: {"hidden": hidden, "logits": logits},
        "namedtuple": lambda: Pair(hidden, logits),
        "dataclass": lambda: Result(hidden, logits),
        "nested": lambda: {"a": [hidden, None, 3], "b": (Result(logits, logits), {})},
        "view": lambda: (hidden.view(-1)[1:], logits.t()),
    }
    return packed[kind]()


class PackedBlock(nn.Module):
    """A block that returns its two tensors in some container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc1 = nn.Linear(DIM, DIM)
        self.fc2 = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.fc1(x))
        return _pack(self.kind, hidden, self.fc2(hidden))


class Outputs(nn.Module):
    """A unit and the root that return containers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.block = PackedBlock(kind)
        self.out = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Any:
        hidden, logits = tensors_of(self.block(x))[:2]
        if self.kind == "view":
            hidden, logits = hidden[: BATCH * DIM - 1].square().sum(), logits.t()
        return _pack(self.kind, logits + hidden, self.out(logits))


def tensors_of(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if is_dataclass(output) and not isinstance(output, type):
        return [t for f in fields(output) for t in tensors_of(getattr(output, f.name))]
    if isinstance(output, Mapping):
        return [t for value in output.values() for t in tensors_of(value)]
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [t for value in output for t in tensors_of(value)]
    return []


def loss_of(output: Any) -> Tensor:
    """Return a loss in which every output tensor has a part of its own."""
    terms = [
        ((tensor.to(torch.promote_types(tensor.dtype, torch.float32)) - 0.3 * i) ** 2)
        .mean()
        .mul(1.0 + i)
        for i, tensor in enumerate(tensors_of(output))
    ]
    # The lengths of a PackedSequence are on the CPU.
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def vectors(generator: torch.Generator) -> Inputs:
    return (torch.randn(BATCH, DIM, generator=generator),)


def tokens(generator: torch.Generator) -> Inputs:
    return (torch.randint(0, VOCAB, (BATCH, 5), generator=generator),)


def images(generator: torch.Generator) -> Inputs:
    return (torch.randn(BATCH, 2, 6, 6, generator=generator),)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Inputs]
    unit_classes: frozenset[type[nn.Module]]


CASES: dict[str, Case] = {
    "mlp": Case(MLP, vectors, frozenset({Block})),
    "uneven": Case(Uneven, vectors, frozenset({Block, OneElement})),
    "transformer": Case(Transformer, tokens, frozenset({TransformerBlock})),
    "tied": Case(Tied, vectors, frozenset({TiedBlock})),
    "called_twice": Case(CalledTwice, vectors, frozenset({Block})),
    "unused": Case(Unused, vectors, frozenset({Block})),
    "frozen": Case(Frozen, vectors, frozenset({Block})),
    "frozen_units": Case(FrozenUnits, vectors, frozenset({Block})),
    "scalar": Case(ScalarNet, vectors, frozenset({ScalarBlock})),
    "mixed_dtype": Case(MixedDtype, vectors, frozenset()),
    "conv": Case(ConvNet, images, frozenset({nn.Conv2d, nn.BatchNorm2d})),
}
