"""Random models, wrapped and trained at random, against the unsharded model.

A case is a program of plain data, drawn from its seed: a tree of nodes (each maps
`[batch, dim]` to the same shape), which of them are units, and a training loop. The
message of a failure holds the seed and the program. More cases:

    FSDP_C_RANDOM_CASES=1000 pytest tests/distributed/test_random_models.py
    FSDP_C_RANDOM_FIRST=123 FSDP_C_RANDOM_CASES=1 pytest ...   # one of them
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

from helpers.distributed import distributed
from helpers.impl import IS_TORCH, BackwardPrefetch, ShardingStrategy, fsdp
from helpers.models import Inputs, loss_of
from helpers.reference import Differential

NUM_CASES = int(os.environ.get("FSDP_C_RANDOM_CASES", "40"))
# torch's FSDP1 has no norm of fp64 gradients.
DTYPE, TOLERANCE = (torch.float32, 2e-4) if IS_TORCH else (torch.float64, 1e-8)
FIRST_CASE = int(os.environ.get("FSDP_C_RANDOM_FIRST", "0"))

LEAVES = ("linear", "low_rank", "scale", "norm", "tied", "unused", "frozen", "constant")
BRANCHES = ("seq", "residual", "parallel", "twice", "packed", "never", "checkpoint")


@dataclass(frozen=True)
class Spec:
    """A node of the program."""

    kind: str
    is_unit: bool
    strategy: str | None = None
    """The unit's own strategy; None: the model's."""
    option: int = 0
    children: "tuple[Spec, ...]" = ()

    def show(self, depth: int = 0) -> str:
        """Return the tree as indented text."""
        unit = f" unit {self.strategy or ''}".rstrip() if self.is_unit else ""
        line = f"{'  ' * depth}{self.kind} option={self.option}{unit}"
        return "\n".join([line, *(c.show(depth + 1) for c in self.children)])


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    num_micro_batches: int
    num_forwards: int
    mode: str
    """sync | no_sync | accumulate."""
    evaluates: bool
    set_to_none: bool
    clips: tuple[float, float] | None
    """(max_norm, norm_type)."""


@dataclass(frozen=True)
class Program:
    """A whole case."""

    seed: int
    dim: int
    root: Spec
    use_orig_params: bool
    strategy: str
    backward_prefetch: str | None
    forward_prefetch: bool
    limit_all_gathers: bool
    optimizer: str
    steps: tuple[Step, ...] = field(default=())

    def show(self) -> str:
        """Return everything that reproduces the case."""
        facts = {k: v for k, v in vars(self).items() if k not in ("root", "steps")}
        steps = "\n".join(f"  {step}" for step in self.steps)
        return f"{facts}\n{self.root.show()}\nsteps:\n{steps}"


def _draw_spec(
    rng: random.Random, depth: int, allowed: frozenset[str], one_strategy: bool
) -> Spec:
    is_branch = depth > 0 and rng.random() < 0.75
    kinds = [k for k in (BRANCHES if is_branch else LEAVES) if k in allowed]
    kind = rng.choice(kinds)
    num_children = 0
    if is_branch:
        num_children = rng.randint(1, 4) if kind in ("seq", "parallel") else 1
    children = tuple(
        _draw_spec(rng, depth - 1, allowed, one_strategy) for _ in range(num_children)
    )
    is_unit = rng.random() < 0.45
    strategy = None
    if not one_strategy and is_unit and rng.random() < 0.3:
        strategy = rng.choice(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
    return Spec(kind, is_unit, strategy, rng.randrange(1 << 16), children)


def draw_program(seed: int) -> Program:
    """Return the case of ``seed``."""
    rng = random.Random(seed)
    use_orig_params = rng.random() < 0.6
    allowed = set(LEAVES + BRANCHES)
    if IS_TORCH:
        # Scalars; a NO_SHARD unit that never runs loses its parameters' names.
        allowed -= {"constant", "never"}
        if not use_orig_params:
            allowed -= {"frozen"}
    one_strategy = rng.random() < 0.6
    root = Spec(
        "seq",
        is_unit=True,
        option=0,
        children=tuple(
            _draw_spec(rng, 3, frozenset(allowed), one_strategy)
            for _ in range(rng.randint(1, 4))
        ),
    )
    steps = []
    for _ in range(rng.randint(2, 4)):
        mode = rng.choice(["sync", "sync", "no_sync", "accumulate"])
        clips = (10 ** rng.uniform(-2, 1), rng.choice([1.0, 2.0, 2.0, float("inf")]))
        steps.append(
            Step(
                num_micro_batches=1 if mode == "sync" else rng.randint(2, 3),
                num_forwards=rng.choice([1, 1, 1, 2]),
                mode=mode,
                evaluates=rng.random() < 0.25,
                set_to_none=rng.random() < 0.7,
                clips=clips if rng.random() < 0.4 else None,
            )
        )
    prefetch = rng.choice(["BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", None])
    return Program(
        seed=seed,
        dim=rng.choice([2, 3, 5, 8, 13]),
        root=root,
        use_orig_params=use_orig_params,
        strategy=rng.choice(["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
        backward_prefetch=prefetch,
        forward_prefetch=rng.random() < 0.3,
        limit_all_gathers=rng.random() < 0.7,
        optimizer=rng.choice(["sgd", "momentum", "adam"]),
        steps=tuple(steps),
    )


class Node(nn.Module):
    """A node of the program as a module."""

    def __init__(self, spec: Spec, dim: int) -> None:
        """Make parameters and children."""
        super().__init__()
        self.spec = spec
        self.children_ = nn.ModuleList(Node(child, dim) for child in spec.children)
        option = spec.option
        bias = option % 3 != 0
        if spec.kind in ("linear", "frozen", "unused"):
            self.fc = nn.Linear(dim, dim, bias=bias)
        if spec.kind == "frozen":
            self.fc.weight.requires_grad_(False)
        if spec.kind == "unused":
            self.extra = nn.Parameter(torch.randn(option % 29 + 1))
        if spec.kind == "low_rank":
            rank = option % 37 + 1
            self.down = nn.Linear(dim, rank, bias=bias)
            self.up = nn.Linear(rank, dim)
        if spec.kind == "scale":
            self.gain = nn.Parameter(torch.randn(dim))
        if spec.kind == "constant":
            self.gain = nn.Parameter(torch.randn(()))
        if spec.kind == "norm":
            self.norm = nn.LayerNorm(dim)
            with torch.no_grad():
                self.norm.bias.normal_()
        if spec.kind == "tied":
            self.first = nn.Linear(dim, dim)
            self.second = nn.Linear(dim, dim, bias=bias)
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        """Map ``[batch, dim]`` to the same shape; a packed node to a dict."""
        out: Tensor = self._leaf(x) if not self.children_ else self._branch(x)
        if self.spec.kind == "packed":
            return {"out": out, "aside": [out * 0.5, None]}
        return out

    def _leaf(self, x: Tensor) -> Tensor:
        kind = self.spec.kind
        if kind in ("scale", "constant"):
            return x * self.gain
        run: dict[str, Callable[[], Tensor]] = {
            "low_rank": lambda: self.up(torch.tanh(self.down(x))),
            "norm": lambda: self.norm(x),
            "tied": lambda: self.second(torch.tanh(self.first(x))),
        }
        return run[kind]() if kind in run else torch.tanh(self.fc(x))

    def _branch(self, x: Tensor) -> Tensor:
        kind = self.spec.kind
        if kind == "never":  # a child that does not run
            return torch.sin(x)
        if kind == "parallel":
            outs = [_call(child, x) for child in self.children_]
            return torch.stack(outs).mean(0)
        if kind == "checkpoint":
            reentrant = self.spec.option % 2 == 0
            out: Tensor = checkpoint(
                _call, self.children_[0], x, use_reentrant=reentrant
            )
            return out
        y = x
        for child in self.children_:
            y = _call(child, y)
        if kind == "twice":
            y = _call(self.children_[0], torch.tanh(y))
        return x + y if kind == "residual" else y


def _call(module: nn.Module, x: Tensor) -> Tensor:
    out = module(x)
    if isinstance(out, dict):
        return out["out"] + out["aside"][0] if out["aside"][1] is None else x
    tensor: Tensor = out
    return tensor


class Net(nn.Module):
    """The root: an input layer, so that every case has a trained parameter."""

    def __init__(self, program: Program) -> None:
        """Make the tree."""
        super().__init__()
        self.inp = nn.Linear(program.dim, program.dim)
        self.body = Node(program.root, program.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, dim]`` to the same shape."""
        return _call(self.body, self.inp(x))


def _wrap(module: nn.Module, program: Program) -> Any:
    """Wrap the units from the leaves up."""
    prefetch = program.backward_prefetch
    kwargs = {
        "use_orig_params": program.use_orig_params,
        "backward_prefetch": prefetch and BackwardPrefetch[prefetch],
        "forward_prefetch": program.forward_prefetch,
        "limit_all_gathers": program.limit_all_gathers,
    }

    def visit(node: Node) -> None:
        for index, child in enumerate(node.children_):
            assert isinstance(child, Node)
            visit(child)
            if child.spec.is_unit:
                strategy = child.spec.strategy or program.strategy
                node.children_[index] = fsdp(
                    child, sharding_strategy=ShardingStrategy[strategy], **kwargs
                )

    assert isinstance(module, Net)
    visit(module.body)
    strategy = ShardingStrategy[program.strategy]
    return fsdp(module, sharding_strategy=strategy, **kwargs)


def _optimizer(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
        "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4),
    }
    return makers[name]


def _train(differential: Differential, program: Program) -> None:
    for step in program.steps:
        differential.zero_grad(set_to_none=step.set_to_none)
        for index in range(step.num_micro_batches):
            is_last = index == step.num_micro_batches - 1
            if step.mode == "no_sync" and not is_last:
                with differential.model.no_sync():
                    differential.forward_backward(step.num_forwards)
            else:
                differential.forward_backward(step.num_forwards)
        differential.check()
        if step.clips is not None:
            differential.clip(*step.clips)
            differential.check()
        differential.step()
        differential.check()
        if step.evaluates:
            differential.evaluate()


@pytest.mark.parametrize("case", range(FIRST_CASE, FIRST_CASE + NUM_CASES))
@distributed(world_size=(2, 3))
def test_random_model(rank: int, world_size: int, case: int) -> None:
    """Losses, gradients, norms and parameters."""
    program = draw_program(case)

    def inputs(generator: torch.Generator) -> Inputs:
        x = torch.randn(3, program.dim, generator=generator, dtype=DTYPE)
        return (x,)

    try:
        differential = Differential(
            lambda: Net(program).to(DTYPE),
            lambda module: _wrap(module, program),
            inputs,
            use_orig_params=program.use_orig_params,
            optimizer=_optimizer(program.optimizer),
            tolerance=TOLERANCE,
        )
        _train(differential, program)
    except Exception as error:
        msg = f"{error}\nprogram of case {case}:\n{program.show()}"
        raise AssertionError(msg) from error


def test_programs_cover_everything() -> None:
    """The default cases hold every kind of node and every mode."""
    programs = [draw_program(case) for case in range(40)]
    kinds: set[str] = set()

    def visit(spec: Spec) -> None:
        kinds.add(spec.kind)
        for child in spec.children:
            visit(child)

    for program in programs:
        visit(program.root)
    missing = (
        set(LEAVES + BRANCHES) - kinds - ({"constant", "never"} if IS_TORCH else set())
    )
    assert not missing
    assert {s.mode for p in programs for s in p.steps} == {
        "sync",
        "no_sync",
        "accumulate",
    }
    assert loss_of(Net(programs[0])(torch.zeros(2, programs[0].dim))).isfinite()
