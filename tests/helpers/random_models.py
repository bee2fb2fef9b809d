"""Random models: a tree of nodes, each of which maps `[batch, dim]` to the same shape.

Models are fp64, so that an error cannot hide in rounding.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DTYPE = torch.float64

LEAVES = (
    "linear",
    "low_rank",
    "scale",
    "norm",
    "tied",
    "unused",
    "frozen",
    "constant",
    "adapter",
    "single",
    "conv",
    "lstm",
    "embedding",
    "void",
    "complex",
    "sometimes",
    "single_element",
    "strided",
)
BRANCHES = (
    "seq",
    "residual",
    "parallel",
    "twice",
    "packed",
    "never",
    "checkpoint",
    "keywords",
    "record",
    "list",
)


@dataclass(frozen=True)
class Spec:
    """A node as plain data; some nodes are units."""

    kind: str
    is_unit: bool
    option: int = 0
    children: "tuple[Spec, ...]" = ()

    def show(self, depth: int = 0) -> str:
        unit = " unit" if self.is_unit else ""
        line = f"{'  ' * depth}{self.kind} option={self.option}{unit}"
        return "\n".join([line, *(c.show(depth + 1) for c in self.children)])

    def kinds(self) -> set[str]:
        return {self.kind}.union(*(child.kinds() for child in self.children))


class Node(nn.Module):
    """A node as a module."""

    def __init__(self, spec: Spec, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.children_ = nn.ModuleList(Node(child, dim) for child in spec.children)
        option = spec.option
        bias = option % 3 != 0
        kind = spec.kind
        if kind in ("linear", "frozen", "unused", "adapter", "single", "void"):
            self.fc = nn.Linear(dim, dim, bias=bias, dtype=DTYPE)
        if kind == "single":
            self.fc = self.fc.float()
        if kind == "frozen":
            self.fc.weight.requires_grad_(False)
        if kind == "adapter":
            self.fc.requires_grad_(False)
        if kind == "unused":
            self.extra = nn.Parameter(torch.randn(option % 29 + 1, dtype=DTYPE))
        if kind == "void":
            self.nothing = nn.Parameter(torch.randn(option % 2 * 3, 0, dtype=DTYPE))
        if kind in ("low_rank", "adapter"):
            rank = option % 37 + 1
            self.down = nn.Linear(dim, rank, bias=bias, dtype=DTYPE)
            self.up = nn.Linear(rank, dim, dtype=DTYPE)
        if kind == "scale":
            self.gain = nn.Parameter(torch.randn(dim, dtype=DTYPE))
        if kind == "constant":
            self.gain = nn.Parameter(torch.randn((), dtype=DTYPE))
        if kind == "single_element":
            self.gain = nn.Parameter(torch.randn(*[1] * (option % 3 + 1), dtype=DTYPE))
        if kind == "complex":
            self.turn = nn.Parameter(torch.randn(dim, dtype=torch.complex128))
        if kind == "norm":
            self.norm = nn.LayerNorm(dim, dtype=DTYPE)
            with torch.no_grad():
                self.norm.bias.normal_()
        if kind in ("tied", "sometimes"):
            self.first = nn.Linear(dim, dim, dtype=DTYPE)
            self.second = nn.Linear(dim, dim, bias=bias, dtype=DTYPE)
        if kind == "tied":
            self.second.weight = self.first.weight
        if kind == "conv":
            self.conv = nn.Conv1d(1, option % 5 + 1, 3, padding=1, dtype=DTYPE)
            self.mix = nn.Parameter(torch.randn(option % 5 + 1, dtype=DTYPE))
        if kind == "lstm":
            self.lstm = nn.LSTM(dim, dim, option % 2 + 1, dtype=DTYPE)
        if kind == "embedding":
            self.table = nn.Embedding(option % 11 + 1, dim, dtype=DTYPE)
        if kind == "strided":
            weight = torch.randn(dim, option % 3 + 1, dim, dtype=DTYPE) / dim
            self.weight = nn.Parameter(weight.transpose(0, 2) if option % 2 else weight)

    def own_params(self) -> list[Tensor]:
        """Return the parameters that are no child's, as they are in a forward.

        Those of a flat parameter, which is no node's, are tensors there.
        """
        parts = [each for name, each in self.named_children() if name != "children_"]
        tables: list[dict[str, Any]] = []
        for part in (self, *itertools.chain(*(each.modules() for each in parts))):
            tables += [part._parameters, vars(part)]
        named = [each for table in tables for each in table.items()]
        return [x for n, x in named if isinstance(x, Tensor) and "_flat_param" not in n]

    def forward(self, x: Tensor) -> Any:
        dtype = x.dtype
        for own in self.own_params():
            is_real = own.is_floating_point() and own.numel() > 0
            if is_real and self.spec.kind not in ("single", "sometimes"):
                x = x.to(own.dtype)
                break
        out: Tensor = self._leaf(x) if not self.children_ else self._branch(x)
        kind = self.spec.kind
        if kind == "packed":
            return {"out": out, "aside": [out * 0.5, None]}
        if kind == "record":
            return Record(out, [out * 0.5, None])
        if kind == "list":
            return [None, (out, {"x": out.tanh()}), 3]
        return out.to(dtype)

    def _leaf(self, x: Tensor) -> Tensor:
        run: dict[str, Callable[[], Tensor]] = {
            "scale": lambda: x * self.gain,
            "constant": lambda: x * self.gain,
            "single_element": lambda: x * self.gain.flatten(),
            "complex": lambda: (x * self.turn).imag,
            "low_rank": lambda: self.up(torch.tanh(self.down(x))),
            "norm": lambda: self.norm(x),
            "tied": lambda: self.second(torch.tanh(self.first(x))),
            "adapter": lambda: torch.tanh(self.fc(x) + self.up(self.down(x))),
            "sometimes": lambda: self._one_of_two(x),
            "single": lambda: torch.tanh(self.fc(x.float()).to(x.dtype)),
            "conv": lambda: torch.tanh(
                torch.einsum("bcd,c->bd", self.conv(x.unsqueeze(1)), self.mix)
            ),
            "lstm": lambda: self.lstm(x.unsqueeze(0))[0].squeeze(0),
            "embedding": lambda: x + self._look_up(x),
            "strided": lambda: torch.tanh(torch.einsum("bi,iko->bo", x, self.weight)),
        }
        return run.get(self.spec.kind, lambda: torch.tanh(self.fc(x)))()

    def _one_of_two(self, x: Tensor) -> Tensor:
        """Look at what is used only: the other one may be sharded in backward."""
        used = self.first if x.detach().sum() > 0 else self.second
        return torch.tanh(used(x.to(used.weight.dtype)))

    def _look_up(self, x: Tensor) -> Tensor:
        num = self.table.num_embeddings
        index = (x.detach().double().sum(1).sigmoid() * num).long().clamp(0, num - 1)
        found: Tensor = self.table(index)
        return found

    def _branch(self, x: Tensor) -> Tensor:
        kind = self.spec.kind
        if kind == "never":  # a child that does not run
            return torch.sin(x)
        if kind == "keywords":
            return unpack(self.children_[0](x=x))
        if kind == "parallel":
            outs = [call_part(child, x) for child in self.children_]
            return torch.stack(outs).mean(0)
        if kind == "checkpoint":
            reentrant = self.spec.option % 2 == 0
            return checkpoint(call_part, self.children_[0], x, use_reentrant=reentrant)
        y = x
        for child in self.children_:
            y = call_part(child, y)
        if kind == "twice":
            y = call_part(self.children_[0], torch.tanh(y))
        return x + y if kind == "residual" else y


@dataclass
class Record:
    out: Tensor
    aside: list[Any]


def call_part(module: nn.Module, x: Tensor) -> Tensor:
    return unpack(module(x))


def unpack(out: Any) -> Tensor:
    """Return the sum of what a part's output holds."""
    if isinstance(out, Record):
        out = vars(out)
    if isinstance(out, dict):
        assert out["aside"][1] is None
        return out["out"] + out["aside"][0]
    if isinstance(out, list):
        return out[1][0] - out[1][1]["x"]
    result: Tensor = out
    return result


class Net(nn.Module):
    """The root: an input layer, so that every case has a trained parameter."""

    def __init__(self, root: Spec, dim: int) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, dim, dtype=DTYPE)
        self.body = Node(root, dim)
        self.aside = nn.Linear(dim, 2, dtype=DTYPE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.to(self.inp.weight.dtype)
        hidden = self.inp(x)
        return call_part(self.body, hidden), self.aside(hidden.to(x.dtype))
