"""Random models, wrapped and trained at random, against the unsharded model.

The message of a failure holds the seed and the program. More cases:

    FSDP_C_RANDOM_CASES=1000 pytest tests/distributed/test_random_models.py
    FSDP_C_RANDOM_FIRST=123 FSDP_C_RANDOM_CASES=1 pytest ...   # one of them
    FSDP_C_RANDOM_WITHOUT=adapter,toggle pytest ...   # behind a known bug
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from helpers.distributed import run_task
from helpers.groups import groups_destroyed, hybrid_groups
from helpers.impl import FSDP
from helpers.models import Inputs, loss_of
from helpers.random_programs import (
    BRANCHES,
    DTYPE,
    EVENTS_AFTER,
    EVENTS_INSIDE,
    LEAVES,
    MODES,
    PRECISIONS,
    WORLD_SIZES,
    Net,
    Node,
    Program,
    Step,
    batches_of,
    draw_program,
    left_out,
    make_optimizer,
    wrap,
)
from helpers.reference import (
    Differential,
    assert_same,
    assert_same_tensors,
    full_state_dict,
)
from helpers.tensor_parallel import (
    gather_summoned,
    grad_of,
    new_meshes,
    parallelize_nodes,
    whole_value,
)

BATCHES = batches_of(
    lambda case: draw_program(case).world_size, num_short=24, num_full=24, size=10
)


class ParallelDifferential(Differential):
    """Beside tensor parallelism: whole values are summoned."""

    def gather(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return gather_summoned(self.model)


class _Run:
    def __init__(self, program: Program, groups: Any) -> None:
        self.program = program
        num_tp = program.num_tp
        dp = None
        num_dp = program.world_size // (num_tp or 1)
        if num_tp is not None:
            dp, self.tp = new_meshes(program.mesh or (num_dp,), num_tp)
        self.differential = (Differential if num_tp is None else ParallelDifferential)(
            lambda: Net(program),
            lambda module: wrap(self.parallelized(module), program, groups, dp),
            self.inputs,
            use_orig_params=program.use_orig_params,
            optimizer=make_optimizer(program.optimizer),
            param_dtype=program.param_dtype,
            tolerance=program.tolerance,
        )
        self.both = (self.differential.model, self.differential.reference)
        self.num_freezes = 0
        # Ranks of one tensor parallel group have the same batch.
        self.differential.world_size = num_dp
        self.differential.rank = dist.get_rank() // (num_tp or 1)

    def parallelized(self, module: nn.Module) -> nn.Module:
        if self.program.num_tp is not None:
            assert self.tp is not None
            parallelize_nodes(module, self.tp)
        return module

    def inputs(self, generator: torch.Generator) -> Inputs:
        x = torch.randn(3, self.program.dim, generator=generator, dtype=DTYPE)
        return (x.requires_grad_(self.program.input_requires_grad),)

    def run(self) -> None:
        for step in self.program.steps:
            with self.toggled(step):
                self.step(step)
            for event in step.after:
                self.happen(event)

    def step(self, step: Step) -> None:
        differential = self.differential
        differential.zero_grad(set_to_none=step.set_to_none)
        for index in range(step.num_micro_batches):
            if index == 1:
                self.happen(step.between or "")
            is_last = index == step.num_micro_batches - 1
            with contextlib.nullcontext() if is_last else self.no_sync(step.mode):
                differential.forward_backward(
                    step.num_forwards, lambda: self.happen(step.inside or "")
                )
        differential.check()
        if step.clips is not None:
            differential.clip(*step.clips)
            differential.checked_step()

    def no_sync(self, mode: str) -> contextlib.AbstractContextManager[None]:
        """Return the context of a micro batch that is not the last one."""
        model = self.differential.model
        contexts: dict[str, Any] = {
            "no_sync": model.no_sync,
            "sharded_no_sync": lambda: model.no_sync(sharded=True),
        }
        context: contextlib.AbstractContextManager[None]
        context = contexts.get(mode, contextlib.nullcontext)()
        return context

    @contextlib.contextmanager
    def toggled(self, step: Step) -> Iterator[None]:
        """Freeze one node's trainable parameters for this step."""
        trained: list[tuple[Node, list[bool]]] = []
        if step.toggled is not None:
            for model in self.both:
                nodes = [m for m in model.modules() if isinstance(m, Node)]
                node = nodes[step.toggled % len(nodes)]
                trained.append((node, [p.requires_grad for p in node.own_params()]))
        for node, _ in trained:
            for param in node.own_params():
                param.requires_grad_(False)
        yield
        # Asked for again: of a unit that is unsharded, those of tensor parallelism are
        # others than of a sharded one.
        for node, values in trained:
            for param, value in zip(node.own_params(), values, strict=True):
                param.requires_grad_(value)

    def happen(self, event: str) -> None:
        differential = self.differential
        if event == "evaluate":
            differential.evaluate()
        elif event == "lost_forward":
            differential.forward()
        elif event == "state_dict":
            self.round_trip()
        elif event == "summon":
            self.write_summoned()
        elif event == "summon_grads":
            self.summon_grads()
        elif event == "reference":
            self.run_frozen()
        elif event == "freeze":
            self.freeze()
        elif event == "move":
            self.move()
        elif event == "write":
            differential.scale_params(0.97)

    def run_frozen(self) -> None:
        """Run a forward without gradients while all parameters are frozen, or some.

        So do methods with a reference model that is the model without adapters.
        """
        model = self.differential.model
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        params = dict(model.named_parameters())
        for name in trained[:: self.program.seed % 2 + 1]:
            params[name].requires_grad_(False)
        self.differential.evaluate()
        params = dict(model.named_parameters())  # others, see toggled()
        for name in trained:
            params[name].requires_grad_(True)

    def freeze(self) -> None:
        """Freeze or thaw one node; gradients stay where they are."""
        if not self.program.use_orig_params or "toggle" in left_out():
            return
        self.num_freezes += 1
        for model in self.both:
            nodes = [m for m in model.modules() if isinstance(m, Node)]
            for param in nodes[self.num_freezes * 7 % len(nodes)].own_params():
                param.requires_grad_(not param.requires_grad)

    def move(self) -> None:
        """Put shards and gradients into memory that other processes may have."""
        for index, param in enumerate(self.differential.model.parameters()):
            if isinstance(param, DTensor):
                continue  # torch ends the process
            if (index + self.program.seed) % 3 == 0:
                param.detach().share_memory_()
            if (index + self.program.seed) % 3 == 1 and param.grad is not None:
                param.grad.share_memory_()

    def round_trip(self) -> None:
        """Save, compare, change and load the full state dict."""
        model, reference = self.both
        expected = reference.state_dict()
        state = {n: whole_value(v) for n, v in full_state_dict(model).items()}
        assert list(state) == list(expected)
        assert_same_tensors("state", state, expected, self.program.tolerance)
        state = {name: tensor * 0.98 for name, tensor in expected.items()}
        model.load_state_dict(state)
        reference.load_state_dict(state)

    def write_summoned(self) -> None:
        """Write one parameter in both models, inside a summon."""
        model, reference = self.both
        names = [name for name, _ in reference.named_parameters()]
        name = names[self.program.seed % len(names)]
        with FSDP.summon_full_params(model), torch.no_grad():
            for each in self.both:
                dict(each.named_parameters())[name].mul_(1.03)

    def summon_grads(self) -> None:
        """Compare and change whole gradients, inside a summon."""
        model, reference = self.both
        is_offloaded = bool(self.program.seed % 2)
        with (
            FSDP.summon_full_params(
                model, with_grads=True, offload_to_cpu=is_offloaded
            ),
            torch.no_grad(),
        ):
            mine = dict(model.named_parameters())
            for name, param in reference.named_parameters():
                if param.grad is None:
                    continue
                grad = grad_of(mine[name])
                assert_same(
                    f"gradient {name}",
                    whole_value(grad),
                    param.grad,
                    self.program.tolerance,
                )
                for each in (grad, param.grad):
                    each.mul_(0.5)
        self.differential.check()


def _run_cases(rank: int, world_size: int, cases: tuple[int, ...]) -> None:
    with contextlib.ExitStack() as stack:
        meshes: dict[tuple[int, int], Any] = {}
        for case in cases:
            program = draw_program(case)
            mesh = program.mesh if program.num_tp is None else None
            if mesh is not None and mesh not in meshes:
                meshes[mesh] = stack.enter_context(hybrid_groups(*mesh))
            torch.manual_seed(case)
            try:
                with groups_destroyed():
                    _Run(program, mesh and meshes[mesh]).run()
            except Exception as error:
                msg = f"{error}\nprogram of case {case}:\n{program.show()}"
                raise AssertionError(msg) from error


@pytest.mark.parametrize(("world_size", "cases"), BATCHES)
def test_random_models(world_size: int, cases: tuple[int, ...]) -> None:
    """Losses, gradients, norms, parameters and state dicts."""
    run_task(_run_cases, world_size, {"cases": cases}, timeout_s=12.0 * len(cases))


@pytest.mark.bookkeeping
def test_programs_cover_everything() -> None:
    """The default cases hold every kind of node, every mode and every event."""
    programs = [draw_program(case) for case in range(60)]
    steps = [step for program in programs for step in program.steps]
    kinds = set().union(*(program.root.kinds() for program in programs))
    assert kinds == set(LEAVES + BRANCHES) - left_out()
    assert {step.mode for step in steps} == set(MODES) - left_out()
    events = {event for step in steps for event in (*step.after, step.between)}
    assert events - {"", None} == set(EVENTS_AFTER) - left_out()
    assert {step.inside for step in steps} - {None} == set(EVENTS_INSIDE) - left_out()
    assert {p.world_size for p in programs} == set(WORLD_SIZES)
    assert {p.world_size for p in programs if p.dim > 13} == set(WORLD_SIZES)
    if not left_out():
        assert {p.precision for p in programs} == set(PRECISIONS)
        assert {p.num_tp for p in programs} == {None, 1, 2, 3, 4}
        meshes = {(1, 1), (2, 2), (4, 1), (1, 4), (3, 1), (1, 3), (2, 1), (1, 2)}
        assert {p.mesh for p in programs} >= {None, (2, 2), (1, 4)}
        assert {p.mesh for p in programs} - {None} <= meshes
        assert any(step.toggled is not None for step in steps)
        assert {p.offloads for p in programs} == {True, False}
    net = Net(programs[0])
    x = torch.zeros(2, programs[0].dim, dtype=DTYPE)
    assert loss_of(net(x)).isfinite()
