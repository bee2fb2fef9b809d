"""Random programs for ``fully_shard``: what is drawn, and the kinds of modules.

They add to helpers.random_programs what this API has beside FSDP1's: meshes, tensor
parallelism, options per module, settings between micro-batches.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from helpers.random_programs import (
    DTYPE,
    Case,
    Node,
    Record,
    Spec,
    call_part,
    divisors_of,
    draw_dim,
    draw_num_tp,
    left_out,
    unpack,
)

LEAVES = (
    "linear",
    "low_rank",
    "scale",
    "norm",
    "tied",
    "unused",
    "frozen",
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
# Their values depend on single bits or on which rank uses what.
UNEVEN_USES = {"unused", "sometimes", "never", "void", "frozen", "adapter", "embedding"}
BRANCHES = (
    "seq",
    "residual",
    "parallel",
    "twice",
    "packed",
    "never",
    "checkpoint",
    "checkpoint",
    "keywords",
    "record",
    "list",
)
SYNC_MODES = ("all", "none", "some", "once", "keep")
INSIDE = (
    "nothing",
    "nothing",
    "nothing",
    "evaluate",
    "infer",
    "reshard",
    "unshard",
    "lost_forward",
    "reference",
    "move",
)
BETWEEN = (
    "nothing",
    "nothing",
    "evaluate",
    "infer",
    "lost_forward",
    "state",
    "full_state",
    "optimizer_state",
    "fresh",
    "unshard",
    "reshard",
    "write",
    "toggle",
    "freeze",
    "reference",
    "move",
    "convert",
    "set_reshards",
    "prefetch",
)


@dataclass(frozen=True)
class RowStep:
    sync: str
    num_micro_batches: int
    num_forwards: int
    losses: str
    """"one", "two" (two backwards of one graph) or "retain" (the same one twice)."""
    inside: str
    """What happens between forward and backward."""
    before_step: str
    clips: tuple[float, float] | None
    set_to_none: bool
    after: str


@dataclass(frozen=True)
class RowProgram(Case):
    seed: int
    world_size: int
    mesh: tuple[int, ...]
    """(shard,) or (replicate, shard); all dimensions with ``num_tp`` last."""
    num_tp: int | None
    """Tensor parallel ranks; None: no such mesh."""
    dim: int
    root: Spec
    reshards: Any
    reshards_of_units: bool
    """Whether units have a reshard_after_forward of their own."""
    dims: str
    precision: str
    offloads: bool
    divides: bool
    lists: bool
    """Whether neighbours are one group."""
    ignores: bool
    optimizer: str
    input_requires_grad: bool
    sets_apart: bool
    """Whether parameters of modules with units inside are units apart."""
    steps: tuple[RowStep, ...] = field(default=())


def draw_world_size(rng: random.Random) -> int:
    """Return how many ranks a program has: what is drawn of it first."""
    return rng.choice([2, 3, 4, 4])


def draw_row_program(seed: int) -> RowProgram:
    rng = random.Random(seed)
    world_size = draw_world_size(rng)
    num_tp = draw_num_tp(rng, world_size) if rng.random() < 0.4 else None
    num_dp = world_size // (num_tp or 1)
    mesh: tuple[int, ...] = (num_dp,)
    if rng.random() < 0.35:
        num_replicas = rng.choice(divisors_of(num_dp))
        mesh = (num_replicas, num_dp // num_replicas)
    precision = rng.choice(["none"] * 5 + ["param", "reduce", "mixed"])
    without = set(left_out())
    if rng.random() < 0.75:
        without |= {"single"}
    if precision != "none":
        without |= {"complex", "single"}
    root = Spec(
        "seq",
        is_unit=True,
        option=0,
        children=tuple(_draw_spec(rng, 3, without) for _ in range(rng.randint(1, 4))),
    )
    is_uneven = bool(root.kinds() & UNEVEN_USES)
    optimizers = ["sgd", "sgd", "foreach_sgd"]
    if "sometimes" not in root.kinds():
        optimizers += ["momentum", "foreach_momentum"]
        if precision == "none" and not root.kinds() & {"single", "complex"}:
            optimizers += ["adam", "foreach_adam", "fused_adam"]
            if not is_uneven:
                optimizers += ["adamw", "adamw"]
    optimizer = rng.choice(optimizers)
    if optimizer == "adam" and seed % 2 == 1:
        optimizer = "adamw"  # which steps zeros, but not None
    if num_tp is not None:  # foreach refuses parameters on several meshes
        optimizer = optimizer.removeprefix("foreach_").removeprefix("fused_")
    toggles = optimizer in ("sgd", "foreach_sgd")
    return RowProgram(
        seed=seed,
        world_size=world_size,
        mesh=mesh,
        num_tp=num_tp,
        dim=draw_dim(rng, seed),
        root=root,
        reshards=rng.choice([None, True, False, *divisors_of(mesh[-1])]),
        reshards_of_units=rng.random() < 0.3,
        dims=rng.choice(["rows", "rows", "last", "mixed"]),
        precision=precision,
        offloads=rng.random() < 0.2,
        divides=rng.random() < 0.2,
        lists=rng.random() < 0.25,
        ignores=precision in ("none", "reduce")
        and num_tp is None
        and rng.random() < 0.1,
        optimizer=optimizer,
        input_requires_grad=rng.random() < 0.4,
        sets_apart=seed % 2 == 1,
        steps=tuple(_draw_step(rng, mesh, toggles) for _ in range(rng.randint(2, 4))),
    )


def _draw_spec(rng: random.Random, depth: int, without: set[str]) -> Spec:
    is_branch = depth > 0 and rng.random() < 0.7
    kind = rng.choice(
        [k for k in (BRANCHES if is_branch else LEAVES) if k not in without]
    )
    num_children = 0
    if is_branch:
        many = ("seq", "parallel", "list")
        num_children = rng.randint(1, 4) if kind in many else 1
    children = tuple(_draw_spec(rng, depth - 1, without) for _ in range(num_children))
    return Spec(kind, rng.random() < 0.45, None, rng.randrange(1 << 16), children)


def _draw_step(rng: random.Random, mesh: tuple[int, ...], toggles: bool) -> RowStep:
    modes = [m for m in SYNC_MODES if m != "once" or len(mesh) == 2]
    sync = rng.choice(["all", *modes])
    clips = None
    if rng.random() < 0.3:
        # Not inf: torch has no such norm of a rank's empty part.
        norm_type = rng.choice([1.0, 2.0, 2.0, 3.0])
        clips = (10 ** rng.uniform(-2, 1), norm_type)
    between = [e for e in BETWEEN if toggles or e not in ("toggle", "freeze")]
    return RowStep(
        sync=sync,
        num_micro_batches=rng.choice([1, 1, 2]) if sync == "all" else rng.randint(2, 3),
        num_forwards=rng.choice([1, 1, 1, 2, 3]),
        losses=rng.choice(["one", "one", "one", "two", "retain"]),
        inside=rng.choice(INSIDE),
        before_step=rng.choice(["nothing", "nothing", "evaluate", "lost_forward"]),
        clips=clips,
        set_to_none=rng.random() < 0.6,
        after=rng.choice(between),
    )


class Part(Node):
    """A node with the kinds that only these programs have."""

    def __init__(self, spec: Spec, dim: int) -> None:
        super().__init__(spec, dim)
        option, kind = spec.option, spec.kind
        if kind == "conv":
            self.conv = nn.Conv1d(1, option % 5 + 1, 3, padding=1, dtype=DTYPE)
            self.mix = nn.Parameter(torch.randn(option % 5 + 1, dtype=DTYPE))
        if kind == "lstm":
            self.lstm = nn.LSTM(dim, dim, option % 2 + 1, dtype=DTYPE)
        if kind == "embedding":
            self.table = nn.Embedding(option % 11 + 1, dim, dtype=DTYPE)
        if kind == "void":
            self.fc = nn.Linear(dim, dim, dtype=DTYPE)
            self.nothing = nn.Parameter(torch.randn(option % 2 * 3, 0, dtype=DTYPE))
        if kind == "complex":
            self.turn = nn.Parameter(torch.randn(dim, dtype=torch.complex128))
        if kind == "single_element":
            self.gain = nn.Parameter(torch.randn(*[1] * (option % 3 + 1), dtype=DTYPE))
        if kind == "strided":
            weight = torch.randn(dim, option % 3 + 1, dim, dtype=DTYPE) / dim
            self.weight = nn.Parameter(weight.transpose(0, 2) if option % 2 else weight)

    def forward(self, x: Tensor) -> Any:
        dtype = x.dtype
        for own in self.own_params():
            is_real = own.is_floating_point() and own.numel() > 0
            if is_real and self.spec.kind not in ("single", "sometimes"):
                x = x.to(own.dtype)
                break
        out = super().forward(x)
        kind = self.spec.kind
        if kind == "record":
            return Record(out, [out * 0.5, None])
        if kind == "list":
            return [None, (out, {"x": out.tanh()}), 3]
        return out.to(dtype) if isinstance(out, Tensor) else out

    def own_params(self) -> list[nn.Parameter]:
        return [
            param
            for name, child in (("", self), *self.named_children())
            if name != "children_"
            for param in child.parameters(recurse=name != "")
        ]

    def _leaf(self, x: Tensor) -> Tensor:
        run: dict[str, Callable[[], Tensor]] = {
            "conv": lambda: torch.tanh(
                torch.einsum("bcd,c->bd", self.conv(x.unsqueeze(1)), self.mix)
            ),
            "lstm": lambda: self.lstm(x.unsqueeze(0))[0].squeeze(0),
            "sometimes": lambda: self._one_of_two(x),
            "embedding": lambda: x + self._look_up(x),
            "complex": lambda: (x * self.turn).imag,
            "single_element": lambda: x * self.gain.flatten(),
            "strided": lambda: torch.tanh(torch.einsum("bi,iko->bo", x, self.weight)),
        }
        found = run.get(self.spec.kind)
        return super()._leaf(x) if found is None else found()

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
        if self.spec.kind == "keywords":
            return unpack(self.children_[0](x=x))
        return super()._branch(x)


class RowNet(nn.Module):
    """The root: an input layer, so that every case has a trained parameter."""

    def __init__(self, program: RowProgram) -> None:
        super().__init__()
        self.inp = nn.Linear(program.dim, program.dim, dtype=DTYPE)
        self.body = Part(program.root, program.dim)
        self.aside = nn.Linear(program.dim, 2, dtype=DTYPE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.to(self.inp.weight.dtype)
        hidden = self.inp(x)
        return call_part(self.body, hidden), self.aside(hidden.to(x.dtype))
