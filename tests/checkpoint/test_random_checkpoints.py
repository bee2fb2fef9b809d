"""Random training runs, stopped and resumed at random, against one that never stops.

A run has two or three legs. Each has processes of its own: it makes the model anew, as
another class or on another number of ranks, loads what the leg before saved, trains and
saves. The message of a failure holds the seed and the program. More cases:

    FSDP_C_RANDOM_FIRST=123 FSDP_C_RANDOM_CASES=100 pytest ...
"""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from fsdp_c import checkpoint
from helpers.distributed import run_task
from helpers.groups import kept_mesh
from helpers.impl import FSDP
from helpers.optim_states import in_form
from helpers.random_checkpoints import (
    FILES,
    Net,
    Program,
    Unit,
    draw,
    make_optimizer,
    train,
)
from helpers.random_programs import chosen_cases
from helpers.random_runs import keep_some
from helpers.reference import assert_same_tensors
from helpers.rows import shard_by

TOLERANCE = 1e-8


class Run:
    """A leg of a program, beside the unsharded model that has run all of them."""

    def __init__(self, program: Program, number: int, rank: int) -> None:
        self.program, self.number, self.rank = program, number, rank
        self.leg = program.legs[number]
        self.first = sum(leg.num_steps for leg in program.legs[:number])
        self.steps = range(self.first, self.first + self.leg.num_steps)
        self.plain, self.plain_optim = self._make_plain(number)
        self.model, self.optim = self.make(seed=number)

    def _make_plain(self, number: int) -> tuple[nn.Module, Any]:
        """Return the unsharded model, as it is after the legs before."""
        program, first = self.program, 0
        torch.manual_seed(0)
        model = Net(program, program.legs[0])
        optim = make_optimizer(program, model)
        for leg in program.legs[: number + 1]:
            torch.manual_seed(0)
            fresh = Net(program, leg)
            for part, other in zip(model.parts, fresh.parts, strict=True):
                part.thaws = leg.thaws
                for param, its in zip(
                    part.parameters(), other.parameters(), strict=True
                ):
                    param.requires_grad_(its.requires_grad)
            if leg is not self.leg:
                train(model, optim, range(first, first + leg.num_steps))
            first += leg.num_steps
        return model, optim

    def make(self, seed: int) -> tuple[Any, Any]:
        leg = self.leg
        torch.manual_seed(seed)
        module = Net(self.program, leg)
        if leg.kept:
            keep_some(module, leg.kept)
        names = ("replicate", "shard") if len(leg.mesh or ()) == 2 else ("shard",)
        mesh = None if leg.mesh is None else kept_mesh(leg.mesh, names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NO_SHARD is deprecated
            model = shard_by(leg.api, module, {Unit}, strategy=leg.strategy, mesh=mesh)
        wrong = {} if seed == 0 else {"lr": 9.0}
        if seed and not self.program.lacks_states:
            wrong["weight_decay"] = 9.0  # torch makes states of it
        return model, make_optimizer(self.program, model, **wrong)

    def train(self, steps: range) -> None:
        train(self.model, self.optim, steps, self.rank, self.leg.world_size)

    def state_of(self, model: Any, optim: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the whole state of a model, sharded or not, and of its optimizer."""
        full = StateDictOptions(full_state_dict=True)
        tensors = get_model_state_dict(model, options=full)
        states = get_optimizer_state_dict(model, optim, options=full)["state"]
        frozen = {n for n, p in self.plain.named_parameters() if not p.requires_grad}
        flat = {
            f"{name} {key}": value
            for name, state in states.items()
            for key, value in state.items()
            if name not in frozen  # torch loads none of these
        }
        return tensors, {key: torch.as_tensor(value) for key, value in flat.items()}

    def check(self, when: str) -> None:
        found, states = self.state_of(self.model, self.optim)
        expected, its_states = self.state_of(self.plain, self.plain_optim)
        assert_same_tensors(when, found, expected, TOLERANCE)
        if self.program.lacks_states:
            for name in states.keys() - its_states.keys():
                value = states.pop(name)
                assert name.endswith("step") or not value.any(), name
        assert_same_tensors(when, states, its_states, TOLERANCE)

    def run(self, folder: Path) -> None:
        if self.first:
            self.load(folder / f"{self.number - 1}")
            self.check("loaded")
        folder = folder / f"{self.number}"
        folder.mkdir(exist_ok=True)
        *_, last = self.steps
        self.train(range(self.first, last))
        if self.leg.way == "files over others":
            checkpoint.save(folder / "files", self.model, self.optim)
        self.train(range(last, last + 1))
        if self.leg.inner:
            self.change_objects()
        train(self.plain, self.plain_optim, self.steps)
        self.check("trained")
        self.save(folder)

    def change_objects(self) -> None:
        """Go on with new objects, which load from FSDP's methods."""
        with in_form(self.model, self.leg.inner):
            state = self.model.state_dict()
            states = FSDP.optim_state_dict(self.model, self.optim)
        model, optim = self.make(seed=99)
        with in_form(model, self.leg.inner):
            model.load_state_dict(state)
            FSDP.optim_state_dict_to_load(model, optim, states, load_directly=True)
        self.model, self.optim = model, optim

    def save(self, folder: Path) -> None:
        model, optim, way = self.model, self.optim, self.leg.way
        if way == "files in a thread":
            handle = checkpoint.save(folder / "files", model, optim, blocking=False)
            self.train(range(1000, 1001))  # what is saved does not change
            handle.result()
        elif way in FILES:
            checkpoint.save(folder / "files", model, optim)
        elif way == "dcp":
            dcp.save(self.sharded_state(), checkpoint_id=folder / "dcp")
        else:
            state = self.full_state()
            if self.rank == 0:
                torch.save(state, folder / "full.pt")

    def load(self, folder: Path) -> None:
        model, optim = self.model, self.optim
        # A parameter that was never stepped has no state.
        strict = not self.program.lacks_states
        if (folder / "files").exists():
            checkpoint.load(folder / "files", model, optim)
            return
        if (folder / "dcp").exists():
            state = self.sharded_state()
            planner = DefaultLoadPlanner(allow_partial_load=not strict)
            dcp.load(state, checkpoint_id=folder / "dcp", planner=planner)
        elif self.leg.way == "methods" and isinstance(model, FSDP):
            state = torch.load(folder / "full.pt")
            with in_form(model, "full"):
                model.load_state_dict(state["model"])
                FSDP.optim_state_dict_to_load(
                    model, optim, state["optim"], load_directly=True
                )
            return
        else:
            state = torch.load(folder / "full.pt")
        is_full = (folder / "full.pt").exists()
        options = StateDictOptions(full_state_dict=is_full, strict=strict)
        set_state_dict(
            model,
            optim,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=options,
        )

    def sharded_state(self) -> dict[str, Any]:
        """Return it flattened: torch loads no lists on a rank without rows."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model, optim = get_state_dict(self.model, self.optim, options=options)
        return {"model": model, "optim": optim}

    def full_state(self) -> dict[str, Any]:
        if self.leg.way == "methods" and isinstance(self.model, FSDP):
            with in_form(self.model, "rank0"):
                states = FSDP.optim_state_dict(self.model, self.optim)
            with in_form(self.model, "full"):
                return {"model": self.model.state_dict(), "optim": states}
        options = StateDictOptions(full_state_dict=True)
        model, optim = get_state_dict(self.model, self.optim, options=options)
        return {"model": model, "optim": optim}


def run_leg(rank: int, seed: int, number: int, folder: str) -> None:
    program = draw(seed)
    try:
        Run(program, number, rank).run(Path(folder))
    except Exception as error:
        text = f"{type(error).__name__}: {error}\nleg {number} of {program}"
        raise AssertionError(text) from error


def batches(num_short: int, num_full: int, size: int) -> list[Any]:
    """Return tuples of seeds; those from ``num_short`` on run with ``--full``."""
    first, num_short, num_full = chosen_cases(num_short, num_full)
    return [
        pytest.param(
            tuple(range(first + begin, first + min(begin + size, num_full))),
            id=str(first + begin),
            marks=pytest.mark.only_full if begin >= num_short else (),
        )
        for begin in range(0, num_full, size)
    ]


@pytest.mark.parametrize("seeds", batches(num_short=6, num_full=300, size=3))
def test_resumed_runs_are_those_that_never_stopped(
    tmp_path: Path, seeds: tuple[int, ...]
) -> None:
    for seed in seeds:
        for number, leg in enumerate(draw(seed).legs):
            arguments = {"seed": seed, "number": number, "folder": str(tmp_path)}
            run_task(run_leg, leg.world_size, arguments)
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
