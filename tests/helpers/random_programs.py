"""Random training programs of either API: options and a training loop as plain data.

A program is drawn from its seed. Where it computes or reduces in fp32, its tolerance
says so.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from helpers.random_models import BRANCHES, DTYPE, LEAVES, Spec

WORLD_SIZES = (2, 3, 4)
# A dtype to compute in and one to reduce in; "mixed": each unit has one of three pairs.
PRECISIONS: dict[str, tuple[tuple[torch.dtype | None, torch.dtype | None], ...]] = {
    "none": ((None, None),),
    "param": ((torch.float32, None),),
    "reduce": ((None, torch.float32),),
    "both": ((torch.float32, DTYPE),),
    "mixed": ((torch.float32, DTYPE), (DTYPE, None), (DTYPE, torch.float32)),
}

# One backward, two of one graph, or the same one twice.
LOSSES = ("one", "two", "retain")

# Events, by the place in a step.
INSIDE = ("evaluate", "infer", "reference", "move", "lost_forward")
AFTER = (
    *INSIDE,
    *("state", "full_state", "write", "toggle", "freeze", "convert", "round"),
)


@dataclass(frozen=True)
class Api:
    """What programs of an API choose from."""

    without: tuple[str, ...]
    """Kinds of nodes and precisions that it does not have."""
    syncs: tuple[str, ...]
    inside: tuple[str, ...]
    """What may happen between a forward and its backward."""
    between: tuple[str, ...]
    """What may happen between two micro-batches."""
    before_step: tuple[str, ...]
    after: tuple[str, ...]
    """What may happen after a step."""


FSDP1 = Api(
    without=(),
    syncs=("all", "none", "sharded"),
    inside=INSIDE,
    between=(*INSIDE, "state", "full_state", "summon", "write", "replace"),
    before_step=("move", "state", "full_state", "summon", "write", "replace"),
    # With gradients of all ranks, or no others: only after a step.
    after=(*AFTER, "summon", "summon_grads", "copy", "replace"),
)
FULLY_SHARD = Api(
    without=("constant",),  # it refuses scalars
    syncs=("all", "none", "some", "once", "keep"),
    inside=(*INSIDE, "reshard", "unshard"),
    between=INSIDE,
    before_step=INSIDE,
    after=(
        *AFTER,
        "optimizer_state",
        "fresh",
        "unshard",
        "reshard",
        "set_reshards",
        "prefetch",
    ),
)


def left_out() -> frozenset[str]:
    """Return the kinds and features that programs do without.

    ``FSDP_C_RANDOM_WITHOUT=adapter,toggle`` looks for the next bug behind a known
    one. Programs are other ones then, under the same seeds.
    """
    names = set(os.environ.get("FSDP_C_RANDOM_WITHOUT", "").split(",")) - {""}
    return frozenset(names)


def world_size_of(seed: int) -> int:
    return WORLD_SIZES[seed % len(WORLD_SIZES)]


def chosen_cases(num_short: int, num_full: int) -> tuple[int, int, int]:
    """Return the first case, and how many run in a short and in a full run.

    FSDP_C_RANDOM_FIRST and FSDP_C_RANDOM_CASES choose others; then all of them run.
    """
    names = ("FSDP_C_RANDOM_FIRST", "FSDP_C_RANDOM_CASES")
    if any(name in os.environ for name in names):
        num_short = num_full = int(os.environ.get(names[1], num_short))
    return int(os.environ.get(names[0], "0")), num_short, num_full


def batches_of(*, num_short: int, num_full: int, size: int) -> list[Any]:
    """Return pytest's parameters: world sizes, and tuples of cases that have them.

    Cases from ``num_short`` on run with ``--full``; see chosen_cases().
    """
    first, num_short, num_full = chosen_cases(num_short, num_full)
    found = []
    for marks, begin, end in (
        ((), first, first + num_short),
        (pytest.mark.only_full, first + num_short, first + num_full),
    ):
        for world_size in WORLD_SIZES:
            mine = [n for n in range(begin, end) if world_size_of(n) == world_size]
            for index in range(0, len(mine), size):
                batch = tuple(mine[index : index + size])
                name = f"{world_size}-{batch[0]}"
                found.append(pytest.param(world_size, batch, id=name, marks=marks))
    return found


def divisors_of(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


class Draw(random.Random):
    """Draws all but what is left out."""

    def pick(self, *options: Any) -> Any:
        return self.choice([o for o in options if o not in left_out()])

    def chance(self, probability: float, feature: str = "") -> bool:
        return self.random() < probability and feature not in left_out()

    def num_tp(self, world_size: int) -> int:
        """Return a number of tensor parallel ranks, 2 of 4 in most cases."""
        return self.choice([*divisors_of(world_size), 2 if world_size == 4 else 1])


@dataclass(frozen=True)
class Step:
    sync: str
    num_micro_batches: int
    num_forwards: int
    losses: str
    inside: str
    between: str
    before_step: str
    clips: tuple[float, float] | None
    """(max_norm, norm_type)."""
    set_to_none: bool
    after: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What programs of either API have in common."""

    seed: int
    world_size: int
    mesh: tuple[int, ...]
    """(shard,) or (replicate, shard); all dimensions with ``num_tp`` last."""
    num_tp: int | None
    """Tensor parallel ranks; None: no such mesh."""
    dim: int
    root: Spec
    precision: str
    offloads: bool
    optimizer: str
    input_requires_grad: bool
    units_differ: bool
    """Whether units have a strategy or a reshard_after_forward of their own."""
    steps: tuple[Step, ...]

    @property
    def tolerance(self) -> float:
        """Of every comparison, as a part of the largest element.

        Two elements that are nearly the same, normalized, magnify what fp32 rounds.
        """
        if self.precision == "none" and "single" not in self.root.kinds():
            return 1e-8
        return 0.1 if self.dim == 2 and "norm" in self.root.kinds() else 2e-3

    def show(self) -> str:
        """Return everything that reproduces the case."""
        facts = {k: v for k, v in vars(self).items() if k not in ("root", "steps")}
        steps = "\n".join(f"  {step}" for step in self.steps)
        return f"{facts}\n{self.root.show()}\nsteps:\n{steps}"


@dataclass(frozen=True, kw_only=True)
class FlatProgram(Program):
    """A program of FSDP1's API."""

    use_orig_params: bool
    strategy: str
    backward_prefetch: str | None
    forward_prefetch: bool
    limit_all_gathers: bool
    kept: int
    """Seed of what keep_whole() keeps; 0: nothing."""


@dataclass(frozen=True, kw_only=True)
class RowProgram(Program):
    """A program of ``fully_shard``."""

    reshards: Any
    dims: str
    divides: bool
    lists: bool
    """Whether neighbours are one group."""
    ignores: bool
    sets_apart: bool
    """Whether parameters of modules with units inside are units apart."""


def draw_flat_program(seed: int) -> FlatProgram:
    draw = Draw(f"FSDP1 {seed}")
    use_orig_params = draw.chance(0.6)
    lacks = () if use_orig_params else ("toggle", "freeze")  # by parameter
    common = _draw_common(draw, FSDP1, seed, lambda _: lacks)
    is_hybrid = len(common["mesh"]) == 2
    if is_hybrid and common["num_tp"] is not None:
        common["units_differ"] = False  # there is one mesh for all
    strategies = ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    if is_hybrid:
        strategies = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    prefetches = ["BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", None]
    keeps = common["num_tp"] is None and draw.chance(0.5, "keep_whole")
    return FlatProgram(
        **common,
        use_orig_params=use_orig_params,
        strategy=draw.choice(strategies),
        backward_prefetch=draw.choice(prefetches),
        forward_prefetch=draw.chance(0.3),
        limit_all_gathers=draw.chance(0.7),
        kept=seed + 1 if keeps else 0,
    )


def draw_row_program(seed: int) -> RowProgram:
    draw = Draw(f"fully_shard {seed}")

    def lacks(optimizer: str) -> tuple[str, ...]:
        # torch loads no state of a parameter that is frozen.
        return () if optimizer.endswith("sgd") else ("toggle", "freeze")

    common = _draw_common(draw, FULLY_SHARD, seed, lacks)
    can_ignore = common["precision"] in ("none", "reduce") and common["num_tp"] is None
    return RowProgram(
        **common,
        reshards=draw.choice([None, True, False, *divisors_of(common["mesh"][-1])]),
        dims=draw.choice(["rows", "rows", "last", "mixed"]),
        divides=draw.chance(0.2),
        lists=draw.chance(0.25),
        ignores=can_ignore and draw.chance(0.1),
        sets_apart=draw.chance(0.5),
    )


def _draw_common(
    draw: Draw, api: Api, seed: int, lacks: Callable[[str], tuple[str, ...]]
) -> dict[str, Any]:
    """Return what either API has; ``lacks`` tells events that an optimizer excludes."""
    world_size = world_size_of(seed)
    num_tp = draw.num_tp(world_size) if draw.chance(0.3, "tensor_parallel") else None
    num_dp = world_size // (num_tp or 1)
    mesh: tuple[int, ...] = (num_dp,)
    if draw.chance(0.35, "hybrid"):
        num_replicas = draw.choice(divisors_of(num_dp))
        mesh = (num_replicas, num_dp // num_replicas)
    precision = "none"
    if draw.chance(0.3, "precision"):
        precision = draw.pick(*(p for p in PRECISIONS if p not in api.without))
    without = {*api.without}
    if draw.chance(0.75) or precision != "none":
        without.add("single")
    if precision != "none":
        without.add("complex")
    children = (_draw_spec(draw, 3, without) for _ in range(draw.randint(1, 4)))
    root = Spec("seq", is_unit=True, children=tuple(children))
    kinds = root.kinds()
    optimizers = ["sgd", "sgd", "foreach_sgd"]
    if "sometimes" not in kinds:
        optimizers += ["momentum", "foreach_momentum"]
        if precision == "none" and not kinds & {"single", "complex"}:
            optimizers += ["adam", "foreach_adam", "fused_adam"]
            if api is FULLY_SHARD:  # FSDP1 has zeros where another rank has a gradient
                optimizers += ["adamw", "adamw"]
    optimizer = draw.choice(optimizers)
    if num_tp is not None:  # foreach refuses parameters on several meshes
        optimizer = optimizer.removeprefix("foreach_").removeprefix("fused_")
    lacking = lacks(optimizer)
    return {
        "seed": seed,
        "world_size": world_size,
        "mesh": mesh,
        "num_tp": num_tp,
        # A wide linear layer takes 4 KiB, so its shards are read in place.
        "dim": draw.choice([2, 3, 5, 8, 13]) + (23 if draw.chance(0.25, "wide") else 0),
        "root": root,
        "precision": precision,
        "offloads": draw.chance(0.2, "offload"),
        "optimizer": optimizer,
        "input_requires_grad": draw.chance(0.4),
        "units_differ": draw.chance(0.35),
        "steps": tuple(
            _draw_step(draw, api, mesh, lacking) for _ in range(draw.randint(2, 4))
        ),
    }


def _draw_spec(draw: Draw, depth: int, without: set[str]) -> Spec:
    is_branch = depth > 0 and draw.chance(0.7)
    kinds = BRANCHES if is_branch else LEAVES
    kind = draw.pick(*(k for k in kinds if k not in without))
    num_children = 0
    if is_branch:
        many = ("seq", "parallel", "list")
        num_children = draw.randint(1, 4) if kind in many else 1
    children = tuple(_draw_spec(draw, depth - 1, without) for _ in range(num_children))
    return Spec(kind, draw.chance(0.45), draw.randrange(1 << 16), children)


def _draw_step(
    draw: Draw, api: Api, mesh: tuple[int, ...], lacking: tuple[str, ...]
) -> Step:
    syncs = [s for s in api.syncs if s != "once" or len(mesh) == 2]
    sync = draw.pick("all", *syncs)
    clips = None
    if draw.chance(0.35, "clip"):
        norm_types = [1.0, 2.0, 2.0, 3.0]
        if api is FSDP1:  # torch has no norm inf of a rank's empty part
            norm_types += [torch.inf, round(draw.uniform(0.5, 4.0), 2)]
        clips = (10 ** draw.uniform(-2, 1), draw.choice(norm_types))
    after = [event for event in api.after if event not in lacking]
    return Step(
        sync=sync,
        num_micro_batches=draw.randint(1 if sync == "all" else 2, 3),
        num_forwards=draw.choice([1, 1, 1, 2, 3]),
        losses=draw.pick("one", "one", *LOSSES),
        inside=draw.pick(*api.inside) if draw.chance(0.5) else "",
        between=draw.pick(*api.between) if draw.chance(0.3) else "",
        before_step=draw.pick(*api.before_step) if draw.chance(0.3) else "",
        clips=clips,
        set_to_none=draw.chance(0.65),
        after=tuple(draw.pick(*after) for _ in range(draw.choice([0, 1, 1, 2]))),
    )
