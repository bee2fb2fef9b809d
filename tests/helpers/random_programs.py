"""Random training programs: a model, its wrapping and a training loop as plain data.

A program is drawn from its seed. Its model is a tree of nodes, each of which maps
`[batch, dim]` to the same shape; some of them are units. Models are fp64, so that
an error cannot hide in rounding; where a program computes or reduces in fp32, its
tolerance says so.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_c import keep_whole
from helpers.impl import BackwardPrefetch, CPUOffload, MixedPrecision, fsdp

# torch's FSDP1 has no norm of fp64 gradients.
DTYPE = torch.float64
WORLD_SIZES = (2, 3, 4)

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
    "sometimes",
)
BRANCHES = ("seq", "residual", "parallel", "twice", "packed", "never", "checkpoint")
MODES = ("sync", "no_sync", "sharded_no_sync", "accumulate")
EVENTS = (
    "evaluate",
    "lost_forward",
    "state_dict",
    "summon",
    "write",
    "reference",
    "move",
)
# With gradients of all ranks, or no others: only after a step.
EVENTS_AFTER = (*EVENTS, "summon_grads", "freeze")
# Between a forward and its backward.
EVENTS_INSIDE = ("reference", "move", "evaluate")
PRECISIONS = ("none", "param", "reduce", "both")


# What torch's FSDP1 cannot do, in these programs.
def left_out() -> frozenset[str]:
    """Return the kinds and features that programs do without.

    ``FSDP_C_RANDOM_WITHOUT=adapter,toggle`` looks for the next bug behind a known
    one. Programs are other ones then, under the same seeds.
    """
    names = set(os.environ.get("FSDP_C_RANDOM_WITHOUT", "").split(",")) - {""}
    return frozenset(names)


def batches_of(
    world_size_of: Callable[[int], int], *, num_short: int, num_full: int, size: int
) -> list[Any]:
    """Return pytest's parameters: world sizes, and tuples of cases that have them.

    Cases from ``num_short`` on run with ``--full``. FSDP_C_RANDOM_FIRST and
    FSDP_C_RANDOM_CASES choose others; then all of them run.
    """
    names = ("FSDP_C_RANDOM_FIRST", "FSDP_C_RANDOM_CASES")
    if any(name in os.environ for name in names):
        num_short = num_full = int(os.environ.get(names[1], num_short))
    first = int(os.environ.get(names[0], "0"))
    found = []
    for marks, begin, end in (
        ((), first, first + num_short),
        (pytest.mark.only_full, first + num_short, first + num_full),
    ):
        cases: dict[int, list[int]] = {n: [] for n in WORLD_SIZES}
        for case in range(begin, end):
            cases[world_size_of(case)].append(case)
        for world_size, mine in cases.items():
            for index in range(0, len(mine), size):
                batch = tuple(mine[index : index + size])
                name = f"{world_size}-{batch[0]}"
                found.append(pytest.param(world_size, batch, id=name, marks=marks))
    return found


def divisors_of(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def draw_num_tp(rng: random.Random, world_size: int) -> int:
    """Return a number of tensor parallel ranks, 2 of 4 in most cases."""
    return rng.choice([*divisors_of(world_size), 2 if world_size == 4 else 1])


def draw_dim(rng: random.Random, seed: int) -> int:
    """Return a model's width.

    One in four is wide: a linear layer takes 4 KiB, so its shards are read in place.
    """
    is_wide = seed % 4 == 3 and "wide" not in left_out()
    return rng.choice([2, 3, 5, 8, 13]) + (23 if is_wide else 0)


@dataclass(frozen=True)
class Spec:
    kind: str
    is_unit: bool
    strategy: str | None = None
    """The unit's own strategy; None: the model's."""
    option: int = 0
    children: "tuple[Spec, ...]" = ()

    def show(self, depth: int = 0) -> str:
        unit = f" unit {self.strategy or ''}".rstrip() if self.is_unit else ""
        line = f"{'  ' * depth}{self.kind} option={self.option}{unit}"
        return "\n".join([line, *(c.show(depth + 1) for c in self.children)])

    def kinds(self) -> set[str]:
        return {self.kind}.union(*(child.kinds() for child in self.children))


@dataclass(frozen=True)
class Step:
    num_micro_batches: int
    num_forwards: int
    mode: str
    set_to_none: bool
    clips: tuple[float, float] | None
    """(max_norm, norm_type)."""
    toggled: int | None
    """The node whose parameters are frozen in this step."""
    inside: str | None
    """What happens between the forward and the backward of a micro batch."""
    between: str | None
    """What happens between two micro batches."""
    after: tuple[str, ...]
    """What happens after the step."""


class Case:
    """What programs of either API have in common."""

    dim: int
    root: Spec
    precision: str
    steps: tuple[Any, ...]

    @property
    def is_single(self) -> bool:
        """Whether something is computed or reduced in fp32."""
        return self.precision != "none" or "single" in self.root.kinds()

    @property
    def tolerance(self) -> float:
        """Of every comparison, as a part of the largest element.

        Two elements that are nearly the same, normalized, magnify what fp32 rounds.
        """
        if not self.is_single:
            return 1e-8
        return 0.1 if self.dim == 2 and "norm" in self.root.kinds() else 2e-3

    def show(self) -> str:
        """Return everything that reproduces the case."""
        facts = {k: v for k, v in vars(self).items() if k not in ("root", "steps")}
        steps = "\n".join(f"  {step}" for step in self.steps)
        return f"{facts}\n{self.root.show()}\nsteps:\n{steps}"


@dataclass(frozen=True)
class Program(Case):
    seed: int
    world_size: int
    dim: int
    root: Spec
    use_orig_params: bool
    strategy: str
    mesh: tuple[int, int] | None
    """(replicas, shards) of a hybrid strategy."""
    num_tp: int | None
    """Tensor parallel ranks, of each of these; None: no such mesh."""
    precision: str
    backward_prefetch: str | None
    forward_prefetch: bool
    limit_all_gathers: bool
    input_requires_grad: bool
    offloads: bool
    optimizer: str
    kept: int
    """Seed of what keep_whole() keeps; 0: nothing."""
    steps: tuple[Step, ...] = field(default=())

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The dtype that the units compute in; None: their own."""
        return torch.float32 if self.precision in ("param", "both") else None


def draw_kept(seed: int) -> int:
    """Return a seed for keep_whole() or 0, without changing what else is drawn."""
    if "keep_whole" in left_out():
        return 0
    return random.Random(f"kept {seed}").choice([0, seed + 1])


def keep_some(module: nn.Module, seed: int) -> None:
    """Keep parameters, rows and blocks of 3 elements whole; the first parameter is."""
    rng = random.Random(seed)
    names: list[str] = []

    def choose(name: str, shape: torch.Size) -> int:
        names.append(name)
        kinds = [0, shape.numel(), shape[1:].numel(), 3]
        return shape.numel() if len(names) == 1 else rng.choice(kinds)

    keep_whole(module, choose, max_padding=1e9)


class _Drawer:
    """Draws one program."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.left_out = left_out()

    def choice(self, *options: Any) -> Any:
        return self.rng.choice([o for o in options if o not in self.left_out])

    def chance(self, probability: float, feature: str = "") -> bool:
        return self.rng.random() < probability and feature not in self.left_out

    def spec(self, depth: int, without: frozenset[str], one_strategy: bool) -> Spec:
        is_branch = depth > 0 and self.chance(0.75)
        kinds = [k for k in (BRANCHES if is_branch else LEAVES) if k not in without]
        kind = self.choice(*kinds)
        num_children = 0
        if is_branch:
            num_children = self.rng.randint(1, 4) if kind in ("seq", "parallel") else 1
        children = tuple(
            self.spec(depth - 1, without, one_strategy) for _ in range(num_children)
        )
        is_unit = self.chance(0.45)
        strategy = None
        if not one_strategy and is_unit and self.chance(0.3):
            strategy = self.choice("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
        return Spec(kind, is_unit, strategy, self.rng.randrange(1 << 16), children)

    def step(self, use_orig_params: bool) -> Step:
        mode = self.choice("sync", "sync", *MODES[1:])
        norm_type = self.rng.choice([1.0, 2.0, 2.0, 3.0, float("inf"), 0.0])
        norm_type = norm_type or round(self.rng.uniform(0.5, 4.0), 2)
        max_norm = 10 ** self.rng.uniform(-2, 1)
        num_events = self.rng.choice([0, 0, 0, 1, 1, 2])
        toggles = use_orig_params and self.chance(0.2, "toggle")
        return Step(
            num_micro_batches=1 if mode == "sync" else self.rng.randint(2, 3),
            num_forwards=self.rng.choice([1, 1, 1, 2]),
            mode=mode,
            set_to_none=toggles or self.chance(0.7),
            clips=(max_norm, norm_type) if self.chance(0.4, "clip") else None,
            toggled=self.rng.randrange(1 << 16) if toggles else None,
            inside=self.choice(*EVENTS_INSIDE, None) if self.chance(0.3) else None,
            between=self.choice(*EVENTS, None) if self.chance(0.3) else None,
            after=tuple(self.choice(*EVENTS_AFTER, "") for _ in range(num_events)),
        )

    def program(self) -> Program:
        world_size = WORLD_SIZES[self.seed % len(WORLD_SIZES)]
        use_orig_params = self.chance(0.6)
        is_hybrid = self.chance(0.35, "hybrid")
        precision = (
            self.choice(*PRECISIONS[1:]) if self.chance(0.25, "precision") else "none"
        )
        without = set()
        if precision in ("param", "both"):
            without |= {"checkpoint"}  # the reference recomputes without its casts
        if not self.chance(0.25):
            without |= {"single"}
        num_tp = None
        if self.chance(0.25, "tensor_parallel"):
            num_tp = draw_num_tp(self.rng, world_size)
        # Beside tensor parallelism there is one mesh for all.
        one_strategy = self.chance(0.6) or (is_hybrid and num_tp is not None)
        strategy = self.choice("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
        num_dp = world_size // (num_tp or 1)
        shapes = [(n, num_dp // n) for n in divisors_of(num_dp)]
        if is_hybrid:
            strategy = self.choice("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
        root = Spec(
            "seq",
            is_unit=True,
            option=0,
            children=tuple(
                self.spec(3, frozenset(without), one_strategy)
                for _ in range(self.rng.randint(1, 4))
            ),
        )
        # Whether a gradient is zeros or None may differ from the reference.
        optimizers = ["sgd", "momentum", "adam"]
        if "sometimes" in root.kinds():
            optimizers = ["sgd"]
        return Program(
            seed=self.seed,
            world_size=world_size,
            dim=draw_dim(self.rng, self.seed),
            root=root,
            use_orig_params=use_orig_params,
            strategy=strategy,
            mesh=shapes[self.seed // 3 % len(shapes)] if is_hybrid else None,
            num_tp=num_tp,
            precision=precision,
            backward_prefetch=self.rng.choice(
                ["BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", None]
            ),
            forward_prefetch=self.chance(0.3),
            limit_all_gathers=self.chance(0.7),
            input_requires_grad=self.chance(0.4),
            offloads=self.chance(0.2, "offload"),
            optimizer=self.rng.choice(optimizers),
            kept=0 if num_tp is not None else draw_kept(self.seed),
            steps=tuple(
                self.step(use_orig_params) for _ in range(self.rng.randint(2, 4))
            ),
        )


def draw_program(seed: int) -> Program:
    return _Drawer(seed).program()


class Node(nn.Module):
    """A node of the program as a module."""

    def __init__(self, spec: Spec, dim: int) -> None:
        super().__init__()
        self.spec = spec
        parts = (type(self)(child, dim) for child in spec.children)
        self.children_ = nn.ModuleList(parts)
        option = spec.option
        bias = option % 3 != 0
        kind = spec.kind
        if kind in ("linear", "frozen", "unused", "adapter", "single"):
            self.fc = nn.Linear(dim, dim, bias=bias, dtype=DTYPE)
        if kind == "single":
            self.fc = self.fc.float()
        if kind == "frozen":
            self.fc.weight.requires_grad_(False)
        if kind == "adapter":
            self.fc.requires_grad_(False)
        if kind == "unused":
            self.extra = nn.Parameter(torch.randn(option % 29 + 1, dtype=DTYPE))
        if kind in ("low_rank", "adapter"):
            rank = option % 37 + 1
            self.down = nn.Linear(dim, rank, bias=bias, dtype=DTYPE)
            self.up = nn.Linear(rank, dim, dtype=DTYPE)
        if kind == "scale":
            self.gain = nn.Parameter(torch.randn(dim, dtype=DTYPE))
        if kind == "constant":
            self.gain = nn.Parameter(torch.randn((), dtype=DTYPE))
        if kind == "norm":
            self.norm = nn.LayerNorm(dim, dtype=DTYPE)
            with torch.no_grad():
                self.norm.bias.normal_()
        if kind in ("tied", "sometimes"):
            self.first = nn.Linear(dim, dim, dtype=DTYPE)
            self.second = nn.Linear(dim, dim, bias=bias, dtype=DTYPE)
        if kind == "tied":
            self.second.weight = self.first.weight

    def own_params(self) -> list[nn.Parameter]:
        return [
            param
            for name, param in self.named_parameters()
            if not name.startswith("children_")
        ]

    def forward(self, x: Tensor) -> Any:
        out: Tensor = self._leaf(x) if not self.children_ else self._branch(x)
        if self.spec.kind == "packed":
            return {"out": out, "aside": [out * 0.5, None]}
        return out

    def _leaf(self, x: Tensor) -> Tensor:
        run: dict[str, Callable[[], Tensor]] = {
            "scale": lambda: x * self.gain,
            "constant": lambda: x * self.gain,
            "low_rank": lambda: self.up(torch.tanh(self.down(x))),
            "norm": lambda: self.norm(x),
            "tied": lambda: self.second(torch.tanh(self.first(x))),
            "adapter": lambda: torch.tanh(self.fc(x) + self.up(self.down(x))),
            "sometimes": lambda: torch.tanh(
                (self.first if x.detach().sum() > 0 else self.second)(x)
            ),
            "single": lambda: torch.tanh(self.fc(x.float()).to(x.dtype)),
        }
        return run.get(self.spec.kind, lambda: torch.tanh(self.fc(x)))()

    def _branch(self, x: Tensor) -> Tensor:
        kind = self.spec.kind
        if kind == "never":  # a child that does not run
            return torch.sin(x)
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

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.inp = nn.Linear(program.dim, program.dim, dtype=DTYPE)
        self.body = Node(program.root, program.dim)

    def forward(self, x: Tensor) -> Tensor:
        return call_part(self.body, self.inp(x))


def wrap(
    module: nn.Module, program: Program, groups: Any, device_mesh: Any = None
) -> Any:
    """Wrap the units from the leaves up; ``groups`` are those of its mesh."""
    prefetch = program.backward_prefetch
    reduces = program.precision in ("reduce", "both")
    kwargs: dict[str, Any] = {
        "use_orig_params": program.use_orig_params,
        "backward_prefetch": prefetch and BackwardPrefetch[prefetch],
        "forward_prefetch": program.forward_prefetch,
        "limit_all_gathers": program.limit_all_gathers,
        "cpu_offload": CPUOffload(offload_params=program.offloads),
    }
    if program.precision != "none":
        kwargs["mixed_precision"] = MixedPrecision(
            param_dtype=program.param_dtype,
            # fp64 gradients that are reduced in fp32, or fp32 ones in fp64.
            reduce_dtype=torch.float32
            if program.precision == "reduce"
            else (DTYPE if reduces else None),
        )

    def make(module: nn.Module, own_strategy: str | None) -> Any:
        strategy = own_strategy or program.strategy
        return fsdp(
            module,
            strategy=strategy,
            process_group=groups if "HYBRID" in strategy else None,
            device_mesh=device_mesh,
            **kwargs,
        )

    def visit(node: Node) -> None:
        for index, child in enumerate(node.children_):
            assert isinstance(child, Node)
            visit(child)
            if child.spec.is_unit:
                node.children_[index] = make(child, child.spec.strategy)

    assert isinstance(module, Net)
    if program.kept:
        keep_some(module, program.kept)
    visit(module.body)
    return make(module, None)


def make_optimizer(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    way, _, kind = name.rpartition("_")
    how: dict[str, Any] = {way: True} if way else {"foreach": False}
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.05, **how),
        "momentum": lambda params: torch.optim.SGD(
            params, lr=0.05, momentum=0.9, **how
        ),
        "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4, **how),
        "adamw": lambda params: torch.optim.AdamW(
            params, lr=0.01, eps=1e-4, weight_decay=0.1, **how
        ),
    }
    return makers[kind]
