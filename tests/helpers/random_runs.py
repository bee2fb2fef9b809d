"""Runs a program of helpers.random_programs beside the unsharded model."""

import contextlib
import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
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

from fsdp_c import FSDPModule, fully_shard, keep_whole
from fsdp_c._fully_shard.group import groups_in
from helpers.impl import FSDP, BackwardPrefetch, CPUOffload, MixedPrecision, fsdp
from helpers.models import Inputs
from helpers.random_models import DTYPE, Net, Node
from helpers.random_programs import (
    PRECISIONS,
    Draw,
    FlatProgram,
    Program,
    RowProgram,
    Step,
    divisors_of,
)
from helpers.reference import (
    Differential,
    assert_same,
    assert_same_tensors,
    clean_name,
    full_state_dict,
)
from helpers.rows import gather_rows, small_apart
from helpers.state_dicts import FULL, LOCAL, SHARDED, state_dicts_of
from helpers.tensor_parallel import (
    gather_summoned,
    grad_of,
    new_meshes,
    parallelize_nodes,
    place_in,
    whole_value,
)


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


def keep_some(module: nn.Module, seed: int) -> None:
    """Keep parameters, rows and blocks of 3 elements whole; the first parameter is."""
    rng = random.Random(seed)
    names: list[str] = []

    def choose(name: str, shape: torch.Size) -> int:
        names.append(name)
        kinds = [0, shape.numel(), shape[1:].numel(), 3]
        return shape.numel() if len(names) == 1 else rng.choice(kinds)

    keep_whole(module, choose, max_padding=1e9)


class Run(Differential):
    """Both models, and what a program of either API does with them."""

    def __init__(self, program: Program, *, use_orig_params: bool = True) -> None:
        self.program = program
        self.rng = Draw(program.seed + 1)
        # After a forward without a backward whole parameters may be registered.
        self.is_open = False
        self.ignored: set[str] = set()
        super().__init__(
            lambda: Net(program.root, program.dim),
            lambda model: self.shard(model, program.mesh, program.num_tp),
            self.draw_inputs,
            use_orig_params=use_orig_params,
            optimizer=make_optimizer(program.optimizer),
            tolerance=program.tolerance,
        )

    def draw_inputs(self, generator: torch.Generator) -> Inputs:
        x = torch.randn(3, self.program.dim, generator=generator, dtype=DTYPE)
        return (x.requires_grad_(self.program.input_requires_grad),)

    def shard(
        self, model: nn.Module, shape: tuple[int, ...], num_tp: int | None
    ) -> Any:
        """Cut nodes for tensor parallelism; shard units from the leaves up."""
        self.num_tp = num_tp
        self.dp, tp = new_meshes(shape, num_tp)
        self.rank, self.world_size = place_in(self.dp)
        if tp is not None:
            parallelize_nodes(model, tp)
        nodes = [each for each in model.modules() if isinstance(each, Node)]
        return self.shard_units(model, nodes[::-1], random.Random(self.program.seed))

    # What the APIs do in different ways.

    def shard_units(
        self, model: nn.Module, nodes: Sequence[Node], rng: random.Random
    ) -> Any:
        """Shard the units among the nodes, then the model."""
        raise NotImplementedError

    def params(self) -> Mapping[str, nn.Parameter]:
        """Return the sharded parameters, by name."""
        raise NotImplementedError

    def synced(
        self, mode: str, is_last: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backwards reduce what ``mode`` says."""
        raise NotImplementedError

    def full_state(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        raise NotImplementedError

    # A step.

    def run(self) -> None:
        for step in self.program.steps:
            self.run_step(step)

    def run_step(self, step: Step) -> None:
        self.zero_grad(set_to_none=step.set_to_none)
        for index in range(step.num_micro_batches):
            if index > 0:
                self.happen(step.between)
            with self.synced(step.sync, index == step.num_micro_batches - 1):
                found = [self.losses() for _ in range(step.num_forwards)]
                self.happen(step.inside)
                for each in zip(*found, strict=True):
                    self.backward(step.losses, *map(sum, zip(*each, strict=True)))
                self.is_open = False
        self.check()
        if step.clips is not None:
            self.clip(*step.clips)
        self.happen(step.before_step)
        self.checked_step()
        for event in step.after:
            self.happen(event)

    def losses(self) -> tuple[list[Tensor], list[Tensor]]:
        """Run a forward of both; return the ranks' mean losses and this rank's.

        There is one loss of each output.
        """
        self.is_open = True
        batches = self.batches()
        expected = [self._squares(self.reference(*batch)) for batch in batches]
        own = self._squares(self.model(*batches[self.rank]))
        for loss, like in zip(own, expected[self.rank], strict=True):
            self.check_loss(loss, like.detach())
        means = [torch.stack(each).mean() for each in zip(*expected, strict=True)]
        return means, own

    @staticmethod
    def _squares(outputs: tuple[Tensor, Tensor]) -> list[Tensor]:
        return [output.square().mean() for output in outputs]

    @staticmethod
    def backward(losses: str, first: Tensor, second: Tensor) -> None:
        if losses == "one":
            (first + second).backward()
        elif losses == "two":
            second.backward(retain_graph=True)
            first.backward()
        else:
            total = first + second
            total.backward(retain_graph=True)
            (total * 0.5).backward()

    # Events.

    def happen(self, event: str) -> None:
        if event:
            getattr(self, f"on_{event}")()

    def on_evaluate(self) -> None:
        with self.evaluation():
            self.losses()

    def on_infer(self) -> None:
        with self.evaluation(), torch.inference_mode():
            self.losses()

    def on_lost_forward(self) -> None:
        self.losses()

    def on_reference(self) -> None:
        """Run a forward without gradients while all parameters are frozen, or some.

        So do methods with a reference model that is the model without adapters.
        """
        trained = [name for name, p in self.params().items() if p.requires_grad]
        frozen = [name for name in trained if self.rng.random() < 0.7]
        params = self.params()
        for name in frozen:
            params[name].requires_grad_(False)
        self.on_evaluate()
        params = self.params()
        for name in frozen:
            params[name].requires_grad_(True)

    def on_move(self) -> None:
        """Put shards and gradients into memory that other processes may have."""
        for param in self.params().values():
            for value in (param, param.grad):
                if self.rng.random() < 0.3 and value is not None:
                    local = value.to_local() if isinstance(value, DTensor) else value
                    local.detach().share_memory_()

    def on_write(self) -> None:
        with torch.no_grad():
            for params in (self.params(), self.reference_params):
                for param in params.values():
                    param.mul_(0.9)

    def on_state(self) -> None:
        self.model.load_state_dict(self.model.state_dict())

    def on_round(self) -> None:
        """Convert both to fp32 and back; there are no gradients to be converted."""
        self.zero_grad()
        if "single" not in self.program.root.kinds():
            for model in (self.model, self.reference):
                model.float().double()

    def on_full_state(self) -> None:
        """Save, compare, change and load the full state dict."""
        state = self.full_state()
        expected = self.reference.state_dict()
        assert list(state) == list(expected)
        assert_same_tensors("state", state, expected, self.tolerance)
        state = {name: tensor * 0.98 for name, tensor in expected.items()}
        self.load_full_state(state)
        self.reference.load_state_dict(state)

    def on_freeze(self) -> None:
        """Freeze or thaw some parameters; gradients stay where they are."""
        chosen = {name for name in self.reference_params if self.rng.random() < 0.3}
        chosen -= {"inp.weight", "inp.bias"}  # so that something is trained
        for prefix, part in self.reference.named_modules():
            # A rank uses one half of it: both are trained, or none.
            if isinstance(part, Node) and part.spec.kind == "sometimes":
                own = {f"{prefix}.{name}" for name, _ in part.named_parameters()}
                chosen = chosen | own if min(own) in chosen else chosen - own
        params = self.params()
        for name in chosen - self.ignored:
            wants = not self.reference_params[name].requires_grad
            for each in (self.reference_params[name], params[name]):
                each.requires_grad_(wants)

    def on_toggle(self) -> None:
        """Freeze or thaw some parameters, without old gradients."""
        self.zero_grad(set_to_none=True)
        self.on_freeze()

    def on_convert(self) -> None:
        # Shards in host memory stay there.
        is_moved = not self.program.offloads
        self.model.to(torch.get_default_device() if is_moved else None)


class FlatRun(Run):
    """A program of FSDP1's API."""

    program: FlatProgram

    def __init__(self, program: FlatProgram) -> None:
        super().__init__(program, use_orig_params=program.use_orig_params)

    def shard_units(
        self, model: nn.Module, nodes: Sequence[Node], rng: random.Random
    ) -> Any:
        program = self.program
        if program.kept:
            keep_some(model, program.kept)
        own = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
        for node in nodes:
            for index, child in enumerate(node.children_):
                if child.spec.is_unit:
                    differs = program.units_differ and rng.random() < 0.3
                    strategy = rng.choice(own) if differs else program.strategy
                    node.children_[index] = self._wrap(child, strategy, rng)
        return self._wrap(model, program.strategy, rng)

    def _wrap(self, module: nn.Module, strategy: str, rng: random.Random) -> Any:
        program = self.program
        groups: dict[str, Any] = {}
        if self.num_tp is not None:
            groups = {"device_mesh": self.dp}
        elif "HYBRID" in strategy:
            groups = {"process_group": (self.dp.get_group(1), self.dp.get_group(0))}
        prefetch = program.backward_prefetch
        mixed_precision = None
        if program.precision != "none":
            dtypes = rng.choice(PRECISIONS[program.precision])
            casts, keeps = rng.random() < 0.3, rng.random() < 0.3
            mixed_precision = MixedPrecision(
                *dtypes, cast_forward_inputs=casts, keep_low_precision_grads=keeps
            )
        return fsdp(
            module,
            strategy=strategy,
            use_orig_params=program.use_orig_params,
            mixed_precision=mixed_precision,
            backward_prefetch=prefetch and BackwardPrefetch[prefetch],
            forward_prefetch=program.forward_prefetch,
            limit_all_gathers=program.limit_all_gathers,
            cpu_offload=CPUOffload(offload_params=program.offloads),
            **groups,
        )

    def params(self) -> Mapping[str, nn.Parameter]:
        """Return them as they are shown.

        Of a unit that is unsharded, those of tensor parallelism are others than of a
        sharded one.
        """
        return {clean_name(name): p for name, p in self.model.named_parameters()}

    def gather(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return super().gather() if self.num_tp is None else gather_summoned(self.model)

    def synced(
        self, mode: str, is_last: bool
    ) -> contextlib.AbstractContextManager[None]:
        return self.no_sync(mode != "all" and not is_last, sharded=mode == "sharded")

    def full_state(self) -> dict[str, Tensor]:
        state = full_state_dict(self.model)
        return {name: whole_value(value) for name, value in state.items()}

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        self.model.load_state_dict(state)

    def on_state(self) -> None:
        """Save and load the state dict of any kind."""
        kinds = [FULL, SHARDED]
        if self.num_tp is None and not self.program.kept:
            kinds.append(LOCAL)
        offloads = self.rng.random() < 0.5
        with state_dicts_of(self.model, self.rng.choice(kinds), offloads=offloads):
            super().on_state()

    def on_replace(self) -> None:
        """Give parameters and gradients other memory, by ``.data`` and ``.grad``."""
        for param in self.params().values():
            if self.rng.random() < 0.3:
                param.data = param.data.clone()
            with contextlib.suppress(RuntimeError):  # of another dtype or shape
                param.grad = None if param.grad is None else param.grad.clone()

    def on_copy(self) -> None:
        """Go on with a copy, which has no gradients; DTensors are not copied."""
        if self.num_tp is not None:
            return
        self.zero_grad()
        self.model = copy.deepcopy(self.model)
        before = self.optimizer.state_dict()
        self.optimizer = make_optimizer(self.program.optimizer)(self.model.parameters())
        self.optimizer.load_state_dict(copy.deepcopy(before))

    def on_summon(self) -> None:
        """Write one parameter in both models, inside a summon."""
        name = self.rng.choice(list(self.reference_params))
        with FSDP.summon_full_params(self.model), torch.no_grad():
            for model in (self.model, self.reference):
                dict(model.named_parameters())[name].mul_(1.03)

    def on_summon_grads(self) -> None:
        """Compare and change whole gradients, inside a summon."""
        is_offloaded = self.rng.random() < 0.5
        with (
            FSDP.summon_full_params(
                self.model, with_grads=True, offload_to_cpu=is_offloaded
            ),
            torch.no_grad(),
        ):
            mine = dict(self.model.named_parameters())
            for name, param in self.reference_params.items():
                if param.grad is None:
                    continue
                grad = grad_of(mine[name])
                assert_same(
                    f"gradient {name}", whole_value(grad), param.grad, self.tolerance
                )
                for each in (grad, param.grad):
                    each.mul_(0.5)
        self.check()


class RowRun(Run):
    """A program of ``fully_shard``."""

    program: RowProgram

    def __init__(self, program: RowProgram) -> None:
        super().__init__(program)
        for name, param in self.reference_params.items():
            self._scale_grads(name, param)

    def shard_units(
        self, model: nn.Module, nodes: Sequence[Node], rng: random.Random
    ) -> Any:
        program = self.program
        if program.ignores:
            # Each rank has the gradients of its own batch: only frozen ones agree.
            named = model.named_parameters()
            self.ignored = {name for name, p in named if not p.requires_grad}
        ignored = {model.get_parameter(name) for name in self.ignored}

        def options() -> dict[str, Any]:
            num_shards = self.dp.size(-1)
            reshards = program.reshards
            if reshards and num_shards % reshards:
                reshards = None
            if program.units_differ:
                reshards = rng.choice([None, True, False, *divisors_of(num_shards)])
            param_dtype, reduce_dtype = rng.choice(PRECISIONS[program.precision])
            return {
                "mesh": self.dp,
                "reshard_after_forward": reshards,
                "shard_placement_fn": self._placement,
                "mp_policy": MixedPrecisionPolicy(
                    param_dtype=param_dtype,
                    reduce_dtype=reduce_dtype,
                    output_dtype=param_dtype and DTYPE,
                ),
                "offload_policy": CPUOffloadPolicy()
                if program.offloads
                else OffloadPolicy(),
                "ignored_params": ignored,
            }

        with small_apart() if program.sets_apart else contextlib.nullcontext():
            for node in nodes:
                children = [c for c in node.children_ if not isinstance(c, FSDPModule)]
                if program.lists and len(children) > 1 and rng.random() < 0.5:
                    fully_shard(children[:2], **options())
                if node.spec.is_unit and not isinstance(node, FSDPModule):
                    fully_shard(node, **options())
            sharded = fully_shard(model, **options())
        self.sharded = dict(sharded.named_parameters())
        self.ratios = self._set_divisors(sharded) if program.divides else {}
        return sharded

    def _placement(self, param: nn.Parameter) -> Shard | None:
        dims = self.program.dims
        if dims == "rows":
            return None
        is_last = dims == "last" or param.numel() % 2 == 0
        return Shard(param.ndim - 1 if is_last else 0)

    def _set_divisors(self, model: nn.Module) -> dict[str, float]:
        """Give groups divide factors; return what gradients are multiplied by then."""
        names = {id(param): name for name, param in model.named_parameters()}
        rng = random.Random(self.program.seed + 2)
        ratios = {}
        for group in groups_in(model):
            if not group.apart:  # from the group before it, whose factor it has
                factor = rng.choice([1.0, 2.0, 3.0, 0.5])
                module: Any = group.modules[0]
                module.set_gradient_divide_factor(factor)
            for param in group.params.sharded:
                ratios[names[id(param)]] = self.world_size / factor
        return ratios

    def _scale_grads(self, name: str, param: nn.Parameter) -> None:
        """Multiply what backwards add to a gradient of the reference by its ratio."""
        is_trained = param.requires_grad
        param.requires_grad_(True)  # a tensor that is frozen takes no hook
        param.register_hook(lambda grad: grad * self.ratios.get(name, 1.0))
        param.requires_grad_(is_trained)

    def params(self) -> Mapping[str, nn.Parameter]:
        return self.sharded

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
            if name not in self.ignored:
                expected = self.reference_params[name].grad
                assert (param.grad is None) == (expected is None), name

    def clip(self, max_norm: float, norm_type: float = 2.0) -> None:
        """Clip both; with parameters that are not sharded, do nothing."""
        if self.ignored:
            return
        by_mesh: dict[DeviceMesh, list[Tensor]] = {}
        for param in self.sharded.values():
            assert isinstance(param, DTensor)
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

    def synced(
        self, mode: str, is_last: bool
    ) -> contextlib.AbstractContextManager[None]:
        modules = self.modules()
        if mode == "once":
            self.model.set_requires_all_reduce(is_last)
        elif mode == "some":
            for module in modules:
                on = is_last or self.rng.random() < 0.5
                module.set_requires_gradient_sync(on, recurse=False)
        elif mode != "all":
            if mode == "keep":
                keeps = self.rng.random() < 0.7
                self.model.set_reshard_after_backward(is_last or not keeps)
            self.model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()

    def modules(self) -> list[Any]:
        return [m for m in self.model.modules() if isinstance(m, FSDPModule)]

    def full_state(self) -> dict[str, Tensor]:
        options = StateDictOptions(full_state_dict=True)
        return get_model_state_dict(self.model, options=options)

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, dict(state), options=options)

    def on_unshard(self) -> None:
        self.is_open = True
        for module in self.modules():
            if self.rng.random() < 0.7:
                module.unshard()

    def on_reshard(self) -> None:
        for module in self.modules():
            if self.rng.random() < 0.7:
                module.reshard()

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
        full = StateDictOptions(full_state_dict=True, strict=False)
        state = self.full_state()
        has_state = not self.program.optimizer.endswith("sgd")
        if has_state:
            optimizer = get_optimizer_state_dict(
                self.model, self.optimizer, options=full
            )
        num_tp = self.num_tp
        if num_tp is not None:
            num_tp = self.rng.num_tp(self.program.world_size)
        num_dp = self.program.world_size // (num_tp or 1)
        shapes: list[tuple[int, ...]] = [(n, num_dp // n) for n in divisors_of(num_dp)]
        if len(self.program.mesh) == 1:
            shapes.append((num_dp,))
        self.is_open = False
        net = Net(self.program.root, self.program.dim)
        self.model = self.shard(net, self.rng.choice(shapes), num_tp)
        for name, param in self.reference_params.items():
            self.sharded[name].requires_grad_(param.requires_grad)
            param.grad = None
        self.optimizer = make_optimizer(self.program.optimizer)(self.model.parameters())
        self.load_full_state(state)
        if has_state:
            set_optimizer_state_dict(
                self.model, self.optimizer, optimizer, options=full
            )

    def on_set_reshards(self) -> None:
        for module in self.modules():
            module.set_reshard_after_forward(self.rng.random() < 0.5, recurse=False)

    def on_prefetch(self) -> None:
        modules = self.modules()
        for module in modules:
            module.set_modules_to_forward_prefetch(self.rng.sample(modules, 1))
            module.set_modules_to_backward_prefetch(self.rng.sample(modules, 1))


def run_program(program: Program) -> None:
    kinds: dict[type[Program], Any] = {FlatProgram: FlatRun, RowProgram: RowRun}
    kinds[type(program)](program).run()
