"""Runs a program of helpers.random_rows beside the unsharded model."""

import contextlib
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.tensor import DTensor, Shard

from fsdp_c import FSDPModule, fully_shard
from fsdp_c._fully_shard.group import groups_in
from helpers.models import Inputs
from helpers.random_programs import (
    DTYPE,
    divisors_of,
    draw_num_tp,
    make_optimizer,
)
from helpers.random_rows import (
    Part,
    RowNet,
    RowProgram,
    RowStep,
)
from helpers.reference import Differential, assert_same
from helpers.rows import gather_rows, small_apart
from helpers.tensor_parallel import new_meshes, parallelize_nodes

_POLICIES = {
    "none": MixedPrecisionPolicy(),
    "param": MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=DTYPE),
    "reduce": MixedPrecisionPolicy(reduce_dtype=torch.float32),
}
_MIXED = (
    MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=DTYPE, output_dtype=DTYPE
    ),
    MixedPrecisionPolicy(param_dtype=DTYPE, output_dtype=DTYPE),
    MixedPrecisionPolicy(
        param_dtype=DTYPE, reduce_dtype=torch.float32, output_dtype=DTYPE
    ),
)


class Cutter:
    """Calls parallelize_module and fully_shard as a program says."""

    def __init__(
        self, program: RowProgram, mesh: tuple[int, ...], num_tp: int | None
    ) -> None:
        self.program = program
        self.shape = mesh
        self.num_tp = num_tp
        self.dp, self.tp = new_meshes(mesh, num_tp)
        self.reshards = [None, True, False, *divisors_of(mesh[-1])]

    def __call__(self, model: nn.Module) -> Any:
        """Shard some parts from the leaves up, then the model."""
        with small_apart() if self.program.sets_apart else contextlib.nullcontext():
            return self._shard(model)

    def _shard(self, model: nn.Module) -> Any:
        program, rng = self.program, random.Random(self.program.seed)
        if self.tp is not None:
            parallelize_nodes(model, self.tp)
        parts = [each for each in model.modules() if isinstance(each, Part)]
        ignored: set[nn.Parameter] = set()
        if program.ignores:
            # Each rank has the gradients of its own batch: only frozen ones agree.
            ignored = {
                p for part in parts for p in part.parameters() if not p.requires_grad
            }

        def options() -> dict[str, Any]:
            reshards = program.reshards
            if reshards and self.shape[-1] % reshards:
                reshards = None
            if program.reshards_of_units:
                reshards = rng.choice(self.reshards)
            policy = _POLICIES.get(program.precision) or rng.choice(_MIXED)
            return {
                "mesh": self.dp,
                "reshard_after_forward": reshards,
                "shard_placement_fn": self._placement,
                "mp_policy": policy,
                "offload_policy": CPUOffloadPolicy()
                if program.offloads
                else OffloadPolicy(),
                "ignored_params": ignored,
            }

        for part in reversed(parts):
            children = [c for c in part.children_ if not isinstance(c, FSDPModule)]
            if program.lists and len(children) > 1 and rng.random() < 0.5:
                fully_shard(children[:2], **options())
            if part.spec.is_unit and not isinstance(part, FSDPModule):
                fully_shard(part, **options())
        return fully_shard(model, **options())

    def _placement(self, param: nn.Parameter) -> Shard | None:
        dims = self.program.dims
        if dims == "rows":
            return None
        is_last = dims == "last" or param.numel() % 2 == 0
        return Shard(param.ndim - 1 if is_last else 0)


class RowRun(Differential):
    """Both models, and what a program does with them."""

    def __init__(self, program: RowProgram) -> None:
        self.program = program
        self.rng = random.Random(program.seed + 1)
        self.cutter = Cutter(program, program.mesh, program.num_tp)

        def inputs(generator: torch.Generator) -> Inputs:
            x = torch.randn(3, program.dim, generator=generator, dtype=DTYPE)
            return (x.requires_grad_(program.input_requires_grad),)

        super().__init__(
            lambda: RowNet(program),
            self.cutter,
            inputs,
            use_orig_params=True,
            optimizer=make_optimizer(program.optimizer),
            tolerance=program.tolerance,
        )
        self.ratios: dict[str, float] = {}
        # After a forward without a backward whole ones may be registered.
        self.is_open = False
        self._note_sharded()
        self._set_divisors()

    def _note_sharded(self) -> None:
        self.sharded = dict(self.model.named_parameters())
        # Ranks of one tensor parallel group have the same batch.
        num_tp = self.cutter.num_tp or 1
        self.rank = dist.get_rank() // num_tp
        self.world_size = self.program.world_size // num_tp

    def _set_divisors(self) -> None:
        if not self.program.divides:
            return
        names = {id(param): name for name, param in self.model.named_parameters()}
        rng = random.Random(self.program.seed + 2)
        for group in groups_in(self.model):
            if not group.apart:  # from the group before it, whose factor it has
                factor = rng.choice([1.0, 2.0, 3.0, 0.5])
                module: Any = group.modules[0]
                module.set_gradient_divide_factor(factor)
            for param in group.params.sharded:
                self.ratios[names[id(param)]] = self.world_size / factor

    # Comparing ------------------------------------------------------------------

    def gather(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return whole parameters and gradients, put together here."""
        if not self.is_open:
            named = dict(self.model.named_parameters())
            assert named.keys() == self.sharded.keys()
            assert all(param is self.sharded[name] for name, param in named.items())
        return gather_rows(self.sharded)

    def check(self) -> None:
        """Compare also which gradients are None."""
        super().check()
        for name, param in self.sharded.items():
            expected = self.reference_params[name].grad
            if isinstance(param, DTensor):
                assert (param.grad is None) == (expected is None), name

    def losses(self) -> tuple[list[Tensor], list[Tensor]]:
        batches = self.batches()
        outputs = [self.reference(*batch) for batch in batches]
        expected = [self._two(output) for output in outputs]
        means = [torch.stack(each).mean() for each in zip(*expected, strict=True)]
        own = self._two(self.model(*batches[self.rank]))
        for loss, like in zip(own, expected[self.rank], strict=True):
            assert_same("loss", loss.detach(), like.detach(), self.tolerance)
        return means, list(own)

    @staticmethod
    def _two(output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return output[0].square().mean(), output[1].square().mean()

    # What happens ------------------------------------------------------------

    def backward(self, step: RowStep, means: list[Tensor], own: list[Tensor]) -> None:
        self.is_open = False
        kept: dict[str, Tensor | None] = {}
        for name, param in self.reference.named_parameters():
            kept[name], param.grad = param.grad, None
        for losses in (means, own):
            if step.losses == "one":
                torch.stack(losses).sum().backward()
            elif step.losses == "two":
                losses[1].backward(retain_graph=True)
                losses[0].backward()
            else:
                total = torch.stack(losses).sum()
                total.backward(retain_graph=True)
                (total * 0.5).backward()
        for name, param in self.reference.named_parameters():
            old, new = kept[name], param.grad
            if new is not None:
                new = new * self.ratios.get(name, 1.0)
            param.grad = new if old is None else old if new is None else old + new

    def run_step(self, step: RowStep) -> None:
        self.zero_grad(set_to_none=step.set_to_none)
        for index in range(step.num_micro_batches):
            is_last = index == step.num_micro_batches - 1
            self.set_sync(step.sync, is_last)
            found = [self.losses() for _ in range(step.num_forwards)]
            means = [sum(each) for each in zip(*[m for m, _ in found], strict=True)]
            own = [sum(each) for each in zip(*[o for _, o in found], strict=True)]
            self.happen(step.inside)
            self.backward(step, means, own)  # type: ignore[arg-type]
        self.check()
        if step.clips is not None:
            self.clip(*step.clips)
        self.happen(step.before_step)
        self.step()
        self.check()
        self.happen(step.after)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> None:
        """Clip both; with parameters that are not sharded, do nothing."""
        by_mesh: dict[DeviceMesh, list[Tensor]] = {}
        for param in self.sharded.values():
            if not isinstance(param, DTensor):
                return
            by_mesh.setdefault(param.device_mesh, []).append(param)
        expected = nn.utils.clip_grad_norm_(
            self.reference.parameters(), max_norm, norm_type
        )
        # torch takes the parameters of one mesh at a time.
        norms = []
        for params in by_mesh.values():
            grads = [param.grad for param in params if param.grad is not None]
            if not grads:
                continue
            norm: Any = nn.utils.get_total_norm(grads, norm_type)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        assert_same("norm", total, expected, max(1e-8, self.tolerance))
        for params in by_mesh.values():
            nn.utils.clip_grads_with_norm_(params, max_norm, total)

    def set_sync(self, mode: str, is_last: bool) -> None:
        """Choose what the next backward reduces."""
        if mode == "all":
            return
        modules = self.modules()
        if mode == "once":
            self.model.set_requires_all_reduce(is_last)
        elif mode == "some":
            for module in modules:
                on = is_last or self.rng.random() < 0.5
                module.set_requires_gradient_sync(on, recurse=False)
        else:
            if mode == "keep":
                keeps = self.rng.random() < 0.7
                self.model.set_reshard_after_backward(is_last or not keeps)
            self.model.set_requires_gradient_sync(is_last)

    def modules(self) -> list[Any]:
        return [m for m in self.model.modules() if isinstance(m, FSDPModule)]

    def happen(self, event: str) -> None:
        if event == "nothing":
            return
        run: Any = getattr(self, f"on_{event}", None) or getattr(self, event)
        run()

    def evaluate(self) -> None:
        with self.evaluation():
            self.losses()
        self.is_open = True

    def on_infer(self) -> None:
        with self.evaluation(), torch.inference_mode():
            self.losses()
        self.is_open = True

    def on_lost_forward(self) -> None:
        self.losses()
        self.is_open = True

    def on_settle(self) -> None:
        """Have the sharded parameters registered."""
        for module in self.modules():
            module.reshard()
        self.is_open = False

    def on_unshard(self) -> None:
        self.is_open = True
        for module in self.modules():
            if self.rng.random() < 0.7:
                module.unshard()

    def on_reshard(self) -> None:
        for module in self.modules():
            if self.rng.random() < 0.7:
                module.reshard()

    def on_state(self) -> None:
        self.model.load_state_dict(self.model.state_dict())

    def on_full_state(self) -> None:
        full = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(self.model, options=full)
        expected = self.reference.state_dict()
        for name, value in state.items():
            assert_same(f"state {name}", value, expected[name], self.tolerance)
        assert state.keys() == expected.keys()
        set_model_state_dict(self.model, state, options=full)

    def on_optimizer_state(self) -> None:
        if self.program.optimizer.endswith("sgd"):
            return  # torch wants a tensor in the state
        # Not strict: what had no gradient yet has no state.
        is_full = self.rng.random() < 0.5
        options = StateDictOptions(full_state_dict=is_full, strict=False)
        state = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        set_optimizer_state_dict(self.model, self.optimizer, state, options=options)

    def on_fresh(self) -> None:
        """Go on with another model, over another mesh."""
        full = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(self.model, options=full)
        has_state = not self.program.optimizer.endswith("sgd")
        if has_state:
            optimizer = get_optimizer_state_dict(
                self.model, self.optimizer, options=full
            )
        wants = [param.requires_grad for param in self.reference.parameters()]
        num_tp = self.cutter.num_tp
        if num_tp is not None:
            num_tp = draw_num_tp(self.rng, self.program.world_size)
        num_dp = self.program.world_size // (num_tp or 1)
        shapes: list[tuple[int, ...]] = [(num_dp,)]
        shapes += [(n, num_dp // n) for n in divisors_of(num_dp)]
        shape = self.rng.choice(shapes)
        if len(self.program.mesh) == 2 and len(shape) == 1:
            shape = (1, num_dp)
        self.is_open = False
        self.cutter = Cutter(self.program, shape, num_tp)
        self.model = self.cutter(RowNet(self.program))
        for param, want in zip(self.model.parameters(), wants, strict=True):
            param.requires_grad_(want)
        self.optimizer = make_optimizer(self.program.optimizer)(self.model.parameters())
        set_model_state_dict(self.model, state, options=full)
        full.strict = False  # what had no gradient yet has no state
        if has_state:
            set_optimizer_state_dict(
                self.model, self.optimizer, optimizer, options=full
            )
        self._note_sharded()
        self._set_divisors()
        for param in self.reference.parameters():
            param.grad = None

    def on_write(self) -> None:
        with torch.no_grad():
            for name, param in self.reference.named_parameters():
                param.mul_(0.9)
                self.sharded[name].mul_(0.9)

    def on_reference(self) -> None:
        """Run a forward without gradients while all parameters are frozen, or some.

        So do methods with a reference model that is the model without adapters.
        """
        trained = [p for p in self.sharded.values() if p.requires_grad]
        frozen = [p for p in trained if self.rng.random() < 0.7]
        for param in frozen:
            param.requires_grad_(False)
        self.evaluate()
        for param in frozen:
            param.requires_grad_(True)

    def on_move(self) -> None:
        """Put shards and gradients into memory that other processes may have."""
        for param in self.sharded.values():
            if isinstance(param, DTensor) and self.rng.random() < 0.3:
                param.to_local().detach().share_memory_()
            if isinstance(param.grad, DTensor) and self.rng.random() < 0.3:
                param.grad.to_local().share_memory_()

    def on_freeze(self) -> None:
        """Freeze or thaw some parameters; gradients stay where they are."""
        self.toggle()

    def on_toggle(self) -> None:
        """Freeze or thaw some parameters, without old gradients."""
        self.zero_grad(set_to_none=True)
        self.toggle()

    def toggle(self) -> None:
        names = [name for name, _ in self.reference.named_parameters()]
        chosen = {name for name in names if self.rng.random() < 0.3}
        for prefix, part in self.reference.named_modules():
            # A rank uses one half of it: both are trained, or none.
            if isinstance(part, Part) and part.spec.kind == "sometimes":
                own = {f"{prefix}.{name}" for name, _ in part.named_parameters()}
                chosen = chosen | own if min(own) in chosen else chosen - own
        for name, param in self.reference.named_parameters():
            is_ignored = not isinstance(self.sharded[name], DTensor)
            if name in chosen and not is_ignored and not name.startswith("inp"):
                param.requires_grad_(not param.requires_grad)
                self.sharded[name].requires_grad_(param.requires_grad)

    def on_convert(self) -> None:
        # Shards in host memory stay there.
        is_moved = not self.program.offloads
        self.model.to(torch.get_default_device() if is_moved else None)

    def on_set_reshards(self) -> None:
        for module in self.modules():
            module.set_reshard_after_forward(self.rng.random() < 0.5, recurse=False)

    def on_prefetch(self) -> None:
        modules = self.modules()
        for module in modules:
            module.set_modules_to_forward_prefetch(self.rng.sample(modules, 1))
            module.set_modules_to_backward_prefetch(self.rng.sample(modules, 1))


def run_row_program(program: RowProgram) -> None:
    both = RowRun(program)
    for step in program.steps:
        both.run_step(step)
