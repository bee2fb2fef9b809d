"""Random models under ``fully_shard``, in fp64 against the unsharded model, to 1e-8.

pytest --full tests/distributed/test_fully_shard_random.py       # 240 cases
FSDP_C_RANDOM_FIRST=123 FSDP_C_RANDOM_CASES=1 pytest ...         # one of them
"""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_c import FSDPModule, fully_shard
from fsdp_c._fully_shard import arguments
from helpers.distributed import run_task
from helpers.groups import groups_destroyed
from helpers.models import Inputs
from helpers.random_programs import (
    DTYPE,
    Net,
    Node,
    Program,
    draw_program,
    make_optimizer,
)
from helpers.rows import Rows

FIRST_CASE = int(os.environ.get("FSDP_C_RANDOM_FIRST", "0"))
NUM_CASES = int(os.environ.get("FSDP_C_RANDOM_CASES", "24"))
NUM_FULL_CASES = 240
BATCH = 12


class Options:
    """What is drawn beside the program."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.world_size: int = rng.choice([2, 3, 4, 4])
        self.mesh = (2, 2) if self.world_size == 4 and rng.random() < 0.3 else None
        num_shards = 2 if self.mesh else self.world_size
        sizes = [each for each in (1, 2, 4) if num_shards % each == 0]
        self.reshards = rng.choice([None, True, False, *sizes])
        self.dims = rng.choice(["rows", "last", "mixed"])
        self.share = rng.choice([0.3, 0.7, 1.0])  # of the nodes that are groups

    def placement(self, param: nn.Parameter) -> Shard | None:
        """Choose a dimension, the same on all ranks."""
        if self.dims == "rows":
            return None
        is_last = self.dims == "last" or param.numel() % 2 == 0
        return Shard(param.ndim - 1 if is_last else 0)


def shard(module: nn.Module, options: Options) -> Any:
    """Shard some nodes from the leaves up, then the model."""
    kwargs: dict[str, Any] = {
        "reshard_after_forward": options.reshards,
        "shard_placement_fn": options.placement,
    }
    if options.mesh is not None:
        names = ("replicate", "shard")
        kwargs["mesh"] = init_device_mesh("cpu", options.mesh, mesh_dim_names=names)
    nodes = [each for each in module.modules() if isinstance(each, Node)]
    for node in reversed(nodes):
        if options.rng.random() < options.share:
            fully_shard(node, **kwargs)
    return fully_shard(module, **kwargs)


def run(program: Program, seed: int) -> None:
    """Train both models, with whatever may happen between the steps."""
    options = Options(seed)

    def inputs(generator: torch.Generator) -> Inputs:
        x = torch.randn(3, program.dim, generator=generator, dtype=DTYPE)
        return (x.requires_grad_(program.input_requires_grad),)

    both = Rows(
        lambda: Net(program),
        lambda module: shard(module, options),
        inputs,
        optimizer=make_optimizer(program.optimizer),
    )
    events: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "evaluate": both.evaluate,
        "state": lambda: both.model.load_state_dict(both.model.state_dict()),
        "unshard": lambda: [
            each.unshard()
            for each in both.model.modules()
            if isinstance(each, FSDPModule)
        ],
    }
    for _ in range(3):
        both.zero_grad(set_to_none=options.rng.random() < 0.5)
        modes = ["all", "sync", "once"] if options.mesh else ["all", "sync"]
        mode = options.rng.choice(modes)
        num_micro_batches = options.rng.choice([1, 1, 2, 3])
        for index in range(num_micro_batches):
            is_last = index == num_micro_batches - 1
            if mode == "sync":
                keeps = options.rng.random() < 0.5
                both.model.set_reshard_after_backward(is_last or keeps)
                both.model.set_requires_gradient_sync(is_last)
            if mode == "once":
                both.model.set_requires_all_reduce(is_last)
            both.forward_backward()
        both.check()
        events[options.rng.choice(["nothing", "evaluate"])]()
        both.step()
        both.check()
        events[options.rng.choice(list(events))]()


def run_cases(rank: int, world_size: int, cases: tuple[int, ...]) -> None:
    """Run programs; a failure names its seed."""
    for seed in cases:
        program = draw_program(seed)
        if "constant" in program.root.kinds():  # scalars are refused
            continue
        torch.manual_seed(seed)
        try:
            with groups_destroyed():
                run(program, seed)
                arguments._part_meshes.clear()
        except Exception as error:
            raise AssertionError(
                f"{error}\ncase {seed}: {vars(Options(seed))}\n{program.show()}"
            ) from error


def _batches() -> Iterator[Any]:
    """Yield (world size, cases); all but the first cases only with --full."""
    count = NUM_CASES if FIRST_CASE or NUM_CASES != 24 else NUM_FULL_CASES
    sizes = {
        seed: Options(seed).world_size for seed in range(FIRST_CASE, FIRST_CASE + count)
    }
    for is_full in (False, True):
        for world_size in (2, 3, 4):
            mine = [
                seed
                for seed, size in sizes.items()
                if size == world_size and (seed - FIRST_CASE >= NUM_CASES) == is_full
            ]
            for begin in range(0, len(mine), BATCH):
                batch = tuple(mine[begin : begin + BATCH])
                marks = [pytest.mark.only_full] if is_full else []
                yield pytest.param(
                    world_size, batch, id=f"{world_size}-{batch[0]}", marks=marks
                )


@pytest.mark.cpu_only("its meshes are of the CPU")
@pytest.mark.parametrize(("world_size", "cases"), list(_batches()))
def test_random_models(world_size: int, cases: tuple[int, ...]) -> None:
    """Parameters and gradients after each step."""
    run_task(run_cases, world_size, {"cases": cases}, timeout_s=12.0 * len(cases))
