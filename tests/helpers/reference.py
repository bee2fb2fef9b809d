"""The oracle: the unsharded model, trained on the union of all ranks' data.

Every rank runs the *reference*, a copy of the model that was never wrapped, on
every rank's batch, and averages the losses: what data parallelism must equal.
`Differential` drives the reference and the sharded model side by side and compares
losses, every gradient and every parameter, by clean name.

Note [Gathering without knowing the layout]
With use_orig_params=True each parameter is, between steps, this rank's slice of the
flattened parameter; slices follow each other in rank order and may be empty. (Where
nothing is sharded, each rank holds the whole; where replicas are sharded, each of
them does.) With use_orig_params=False the slices of a flat parameter follow each other
in the same way, and FSDP1's attributes of flat parameters say where in the whole its
parameters are (tests/programs/test_flat_param_metadata.py compares them with torch's).
"""

import contextlib
import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from helpers.impl import FSDP, MixedPrecision, StateDictType, assert_idle, fsdp
from helpers.models import CASES, Case, Inputs, loss_of, vectors
from helpers.seeds import generator
from helpers.worker import call

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")

# What a rank sends in one collective; models of tests fit.
_BOX_NBYTES = 1 << 15

# Largest error, as a part of the largest expected element, by compute dtype.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def clean_name(name: str) -> str:
    """Return a parameter's name without the names of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return SGD with momentum: linear in the gradients, so errors stay small.

    No weight decay: it would tell a gradient of zeros from None.
    """
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def assert_same(
    what: str, actual: Tensor, expected: Tensor, tolerance: float = 2e-5
) -> None:
    """Fail unless the error is below ``tolerance`` of the largest element."""
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    if actual.numel() == 0:
        return
    if expected.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    # Offloaded ones are on the host, wherever the reference is.
    actual, expected = actual.cpu().double(), expected.cpu().double()
    error = (actual - expected).abs().max().item()
    scale = expected.abs().max().item()
    if not error <= tolerance * max(scale, 1e-3):
        index = int((actual - expected).abs().flatten().argmax())
        msg = (
            f"{what}: largest error {error:.3g} at element {index} of "
            f"{actual.numel()} (largest expected {scale:.3g}, tolerance "
            f"{tolerance:g})\n  actual   {actual.flatten()[:8].tolist()}\n"
            f"  expected {expected.flatten()[:8].tolist()}"
        )
        raise AssertionError(msg)


def assert_same_tensors(
    what: str,
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float = 2e-5,
) -> None:
    """Compare two dicts of tensors; name every one that differs."""
    missing = sorted(expected.keys() - actual.keys())
    extra = sorted(actual.keys() - expected.keys())
    assert not missing + extra, f"{what}: missing {missing}, unexpected {extra}"
    errors = []
    for name in _differing(actual, expected, tolerance):
        tensor = expected[name]
        try:
            assert_same(f"{what} {name}", actual[name], tensor, tolerance)
        except AssertionError as error:
            errors.append(str(error))
    if errors:
        raise AssertionError("\n".join(errors))


def _differing(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float
) -> list[str]:
    """Return the names for which `assert_same` may fail; few calls find them."""
    plain = [
        name
        for name, tensor in expected.items()
        if tensor.numel() > 0
        and tensor.is_floating_point()
        and actual[name].shape == tensor.shape
        and actual[name].is_floating_point()
    ]
    if not plain:
        return list(expected)
    wanted = [expected[name].detach().cpu().double() for name in plain]
    found = [actual[name].detach().cpu().double() for name in plain]
    errors = torch.stack(
        torch._foreach_norm(torch._foreach_sub(found, wanted), torch.inf)
    )
    scales = torch.stack(torch._foreach_norm(wanted, torch.inf))
    is_same = (errors <= tolerance * scales.clamp(min=1e-3)).tolist()
    same = {name for name, same in zip(plain, is_same, strict=True) if same}
    return [name for name in expected if name not in same]


def _whole(name: str, pieces: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Return the parameter of ``shape`` that the ranks' pieces make up.

    Once, or once per replica: those must be equal.
    """
    numels = [piece.numel() for piece in pieces]
    replicas: list[Tensor] = []
    begin, found = 0, 0
    for end, numel in enumerate(numels, 1):
        found += numel
        if found == shape.numel():
            flat = torch.cat([piece.flatten() for piece in pieces[begin:end]])
            replicas.append(flat.reshape(shape))
            begin, found = end, 0
    # What follows the last whole replica can only be empty.
    message = f"{name}: the ranks hold {numels} elements of {shape.numel()}"
    assert replicas, message
    assert found == 0, message
    for index, replica in enumerate(replicas[1:], 1):
        assert torch.equal(replica, replicas[0]), f"{name}: replica {index} differs"
    return replicas[0]


def parts_of_all_ranks(tensors: Iterable[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return what every rank holds of each tensor, in fp64 or complex128. Collective.

    As NumPy's arrays: pickling torch's tensors took half of the time of a check.
    """
    mine = [
        (t.to(torch.complex128) if t.is_complex() else t.double()).numpy()
        for t in (tensor.detach().cpu() for tensor in tensors)
    ]
    theirs = objects_of_all_ranks(mine)
    return [tuple(map(torch.from_numpy, parts)) for parts in zip(*theirs, strict=True)]


def objects_of_all_ranks(mine: Any) -> list[Any]:
    """Return every rank's object. Collective, one call where no object is large."""
    data = pickle.dumps(mine)
    box = bytearray(len(data).to_bytes(8, "little") + data[: _BOX_NBYTES - 8])
    tensor = torch.frombuffer(box.ljust(_BOX_NBYTES), dtype=torch.uint8)
    boxes = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(boxes, tensor)
    found = [each.numpy().tobytes() for each in boxes]
    sizes = [int.from_bytes(each[:8], "little") for each in found]
    if max(sizes) <= _BOX_NBYTES - 8:
        return [
            pickle.loads(each[8 : 8 + size])
            for each, size in zip(found, sizes, strict=True)
        ]
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    return theirs


def gather_orig(
    model: nn.Module, shapes: dict[str, torch.Size]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return whole parameters and gradients of ``use_orig_params=True``.

    Collective. A gradient that is None on a rank counts as zeros.
    """
    params: dict[str, Tensor] = {}
    grads: dict[str, Tensor] = {}
    for full_name, param in model.named_parameters():
        name = clean_name(full_name)
        assert name not in params, f"{name} stands twice in named_parameters()"
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        assert grad.shape == param.shape, (
            f"{name}: gradient {tuple(grad.shape)}, parameter {tuple(param.shape)}"
        )
        params[name], grads[name] = param, grad
    assert list(params) == list(shapes), f"names {[*params]}, expected {[*shapes]}"
    parts = parts_of_all_ranks([*params.values(), *grads.values()])
    wholes = [
        _whole(name, pieces, shapes[name])
        for name, pieces in zip([*params, *grads], parts, strict=True)
    ]
    return (
        dict(zip(params, wholes, strict=False)),
        dict(zip(grads, wholes[len(params) :], strict=True)),
    )


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the full state dict, on every rank. Collective."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state: dict[str, Tensor] = model.state_dict()
    return state


def gather_flat(
    model: nn.Module, first_names: dict[str, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return whole parameters and gradients of ``use_orig_params=False``.

    Collective. ``first_names`` has of each name that of the same parameter which
    comes first in the reference.
    """
    params = dict(model.named_parameters())
    stray = [n for n, p in params.items() if not p.requires_grad and p.grad is not None]
    assert not stray, f"frozen, with a gradient: {stray}"
    grads = {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in params.items()
    }
    parts = parts_of_all_ranks([*params.values(), *grads.values()])
    wholes: list[dict[str, Tensor]] = [{}, {}]
    for index, pieces in enumerate(parts):
        full_name, param = list(params.items())[index % len(params)]
        name = clean_name(full_name)
        found = wholes[index // len(params)]
        if not hasattr(param, "_fqns"):  # an ignored one
            found[first_names[name]] = _whole(name, pieces, param.shape)
            continue
        flat = _whole(name, pieces, param._padded_unsharded_size)
        prefix = name.rpartition("_flat_param")[0]
        originals = zip(param._fqns, param._shapes, strict=True)
        begin = 0
        for numel, is_padding in zip(
            param._numels_with_padding, param._is_padding_mask, strict=True
        ):
            if not is_padding:
                fqn, shape = next(originals)
                value = flat[begin : begin + numel].view(shape)
                found[first_names[prefix + fqn]] = value
            begin += numel
    return wholes[0], wholes[1]


class Differential:
    """The sharded model and the reference, driven side by side.

    Args:
        build: Makes the model; seeded alike on every rank.
        wrap: Makes the sharded model of a copy of it.
        inputs: Makes a batch from a generator.
        use_orig_params: As given to the wrapper by ``wrap``.
        optimizer: Makes both optimizers.
        param_dtype: The dtype that the reference computes in (mixed precision).
        tolerance: Of every comparison; by default that of the compute dtype.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        wrap: Callable[[nn.Module], Any],
        inputs: Callable[[torch.Generator], Inputs],
        *,
        use_orig_params: bool,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd,
        param_dtype: torch.dtype | None = None,
        tolerance: float | None = None,
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.reference = build()
        self.model = wrap(copy.deepcopy(self.reference))
        self.inputs = inputs
        self.use_orig_params = use_orig_params
        self.param_dtype = param_dtype
        names = [clean_name(n) for n, _ in self.reference.named_parameters()]
        self.reference_params = dict(
            zip(names, self.reference.parameters(), strict=True)
        )
        first = {id(param): name for name, param in self.reference_params.items()}
        self.first_names = {
            clean_name(name): first[id(param)]
            for name, param in self.reference.named_parameters(remove_duplicate=False)
        }
        if tolerance is None:
            dtypes = {p.dtype for p in self.reference.parameters()}
            tolerance = max(_TOLERANCES[param_dtype or dtype] for dtype in dtypes)
        self.tolerance = tolerance
        self.reference_optimizer = optimizer(self.reference.parameters())
        self.optimizer = optimizer(self.model.parameters())
        self.num_batches = 0

    @classmethod
    def of_case(
        cls,
        case: Case,
        wrap: Callable[[nn.Module], Any],
        *,
        use_orig_params: bool,
        **kwargs: Any,
    ) -> "Differential":
        return cls(
            case.build, wrap, case.inputs, use_orig_params=use_orig_params, **kwargs
        )

    @classmethod
    def of_units(
        cls,
        build: Callable[[], nn.Module],
        unit_classes: Iterable[type[nn.Module]],
        inputs: Callable[[torch.Generator], Inputs] = vectors,
        *,
        use_orig_params: bool = True,
        strategy: str = "FULL_SHARD",
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd,
        mixed_precision: MixedPrecision | None = None,
        tolerance: float | None = None,
        **kwargs: Any,
    ) -> "Differential":
        """Wrap the modules of ``unit_classes``; ``kwargs`` go to the wrapper.

        The reference computes in the dtype of ``mixed_precision``.
        """
        classes = set(unit_classes)
        return cls(
            build,
            lambda module: fsdp(
                module,
                units=classes,
                strategy=strategy,
                use_orig_params=use_orig_params,
                mixed_precision=mixed_precision,
                **kwargs,
            ),
            inputs,
            use_orig_params=use_orig_params,
            optimizer=optimizer,
            param_dtype=mixed_precision and mixed_precision.param_dtype,
            tolerance=tolerance,
        )

    @classmethod
    def of_model(cls, model: str, **kwargs: Any) -> "Differential":
        """Wrap the units of ``CASES[model]``; see ``of_units``."""
        case = CASES[model]
        return cls.of_units(case.build, case.unit_classes, case.inputs, **kwargs)

    def batches(self) -> list[Inputs]:
        self.num_batches += 1
        return [
            self.inputs(generator("batch", self.num_batches, rank))
            for rank in range(self.world_size)
        ]

    def run_reference(self, inputs: Inputs) -> Any:
        """Return the reference's output, computed in ``param_dtype``."""
        if self.param_dtype is None:
            return self.reference(*inputs)
        dtype = self.param_dtype
        state: dict[str, Tensor] = {
            name: p.to(dtype) if p.is_floating_point() else p
            for name, p in self.reference.named_parameters()
        }
        inputs = tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs)
        return functional_call(self.reference, state, inputs, tie_weights=True)

    def reference_forward(self, batches: list[Inputs]) -> tuple[Tensor, Tensor]:
        """Return the mean of the ranks' losses, and this rank's."""
        losses = [loss_of(self.run_reference(batch)) for batch in batches]
        return torch.stack(losses).mean(), losses[self.rank].detach()

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the reference's and this rank's loss on the next batch.

        The second is what the sharded model gives, and is checked.
        """
        batches = self.batches()
        mean_loss, expected = self.reference_forward(batches)
        loss = loss_of(self.model(*batches[self.rank]))
        self.check_loss(loss, expected)
        return mean_loss, loss

    def check_loss(self, loss: Tensor, expected: Tensor) -> None:
        assert_same("loss", loss.detach(), expected, self.tolerance)

    def forward_backward(
        self, num_forwards: int = 1, inside: Callable[[], object] | None = None
    ) -> None:
        """Run ``num_forwards`` forwards, then one backward of their sum.

        Between them, ``inside``.
        """
        losses = [self.forward() for _ in range(num_forwards)]
        if inside is not None:
            inside()
        torch.stack([mean for mean, _ in losses]).sum().backward()
        torch.stack([mine for _, mine in losses]).sum().backward()

    def scale_params(self, factor: float) -> None:
        """Multiply all parameters of both models in place, as they are shown."""
        with torch.no_grad():
            for model in (self.model, self.reference):
                for param in model.parameters():
                    param.mul_(factor)

    def scale_reference_grads(self, factor: float) -> None:
        """Multiply the gradients of the reference, of which none may be None."""
        for param in self.reference.parameters():
            assert param.grad is not None
            param.grad *= factor

    @contextlib.contextmanager
    def no_sync(
        self, is_quiet: bool = True, *, sharded: bool = False
    ) -> Iterator[None]:
        """Let backwards reduce nothing, if ``is_quiet``, or keep sharded sums."""
        options = {"sharded": True} if sharded else {}
        with self.model.no_sync(**options) if is_quiet else contextlib.nullcontext():
            yield

    def accumulate(self, num_micro_batches: int, *, no_sync: bool) -> None:
        """Run micro batches; only the last one synchronises under ``no_sync``."""
        for index in range(num_micro_batches):
            with self.no_sync(no_sync and index < num_micro_batches - 1):
                self.forward_backward()

    def backward_of(
        self, loss: Callable[..., Tensor], inside: Callable[[], object] | None = None
    ) -> None:
        """Run backwards of ``loss(model, *batch)``; compare this rank's loss.

        Before the backwards, ``inside``.
        """
        batches = self.batches()
        losses = [loss(self.reference, *batch) for batch in batches]
        mine = loss(self.model, *batches[self.rank])
        self.check_loss(mine, losses[self.rank].detach())
        if inside is not None:
            inside()
        torch.stack(losses).mean().backward()
        mine.backward()

    def train_on(self, loss: Callable[..., Tensor], num_steps: int = 3) -> None:
        """Do as ``train()``, with a loss as in ``backward_of()``."""
        for _ in range(num_steps):
            self.zero_grad()
            self.backward_of(loss)
            assert any(p.grad is not None for p in self.reference.parameters())
            self.checked_step()

    def gather(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the sharded model's whole parameters and gradients."""
        if self.use_orig_params:
            shapes = {n: p.shape for n, p in self.reference_params.items()}
            return gather_orig(self.model, shapes)
        return gather_flat(self.model, self.first_names)

    def check(self) -> None:
        params, grads = self.gather()
        expected = {n: p.detach() for n, p in self.reference_params.items()}
        assert_same_tensors("parameter", params, expected, self.tolerance)
        expected = {
            n: torch.zeros_like(p) if p.grad is None else p.grad
            for n, p in self.reference_params.items()
        }
        assert_same_tensors("gradient", grads, expected, self.tolerance)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> None:
        """Clip both models' gradients and compare the norms, over ranks too."""
        expected = nn.utils.clip_grad_norm_(
            self.reference.parameters(), max_norm, norm_type
        )
        norm = self.model.clip_grad_norm_(max_norm, norm_type)
        assert_same(f"norm {norm_type}", norm, expected, self.tolerance)
        norms = objects_of_all_ranks(norm.item())
        assert len(set(norms)) == 1, f"the ranks' norms differ: {norms}"

    def step(self) -> None:
        self.reference_optimizer.step()
        self.optimizer.step()

    def checked_step(self) -> None:
        """Step both, between two comparisons."""
        self.check()
        self.step()
        self.check()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        self.reference_optimizer.zero_grad(set_to_none=set_to_none)
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def train(
        self, num_steps: int = 3, *, inside: Callable[[], object] | None = None
    ) -> None:
        """Run whole training steps; compare gradients and parameters in each.

        Before the backwards, ``inside``.
        """
        for _ in range(num_steps):
            self.zero_grad()
            self.forward_backward(inside=inside)
            self.checked_step()

    def run(self, schedule: str) -> None:
        """Run a schedule, one letter for each action; blanks may stand between.

        ``s``, ``n`` and ``p`` are a forward and a backward: synced, in no_sync() and in
        no_sync(sharded=True). ``z`` sets gradients to none and ``Z`` to zeros, ``k``
        clips, ``u`` steps both optimizers. ``r`` replaces gradients by new tensors of
        twice their values, if that is possible then. What can be compared is compared
        after each.
        """
        for action in schedule.replace(" ", ""):
            if action in "zZ":
                self.zero_grad(set_to_none=action == "z")
            elif action == "r":
                for model in (self.model, self.reference):
                    for param in model.parameters():
                        param.grad = None if param.grad is None else 2 * param.grad
            elif action in "np":
                with self.no_sync(sharded=action == "p"):
                    self.forward_backward()
            else:
                {
                    "s": self.forward_backward,
                    "k": lambda: self.clip(0.1),
                    "u": self.step,
                }[action]()
                assert_idle(self.model)
                self.check()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Put both models in eval mode, without gradients."""
        self.reference.eval()
        self.model.eval()
        with torch.no_grad():
            yield
        self.reference.train()
        self.model.train()

    def evaluate(self) -> None:
        """Run a forward without gradients and compare its loss."""
        with self.evaluation():
            self.forward()


def with_model(
    model: str | Callable[[], nn.Module] = "mlp",
    units: Iterable[type[nn.Module]] | None = None,
    **fixed: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give ``test_x(differential, ...)`` both models; goes below ``@distributed``.

    The values of ``model``, ``strategy`` and ``use_orig_params`` that the test is run
    with come before those given here.

    Args:
        model: A name of CASES or, with ``units``, what builds a model.
        units: The classes of units.
        fixed: Other arguments of ``Differential.of_units``.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(body)

        def run(**arguments: Any) -> None:
            names = ("strategy", "use_orig_params")
            given = {name: arguments[name] for name in names if name in arguments}
            options = {**fixed, **given}
            if units is None:
                made = Differential.of_model(arguments.get("model", model), **options)
            else:
                assert callable(model)
                made = Differential.of_units(model, units, **options)
            call(body, {**arguments, "differential": made})

        functools.update_wrapper(run, body)
        named = [p for n, p in signature.parameters.items() if n != "differential"]
        rest = inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)
        vars(run)["__signature__"] = signature.replace(parameters=[*named, rest])
        del vars(run)["__wrapped__"]
        return run

    return decorate
