"""Optimizers that compute each element by itself step shards, and not DTensors.

What comes of it is what DTensors give, to the bit; see fsdp_c/_engines/lent_shards.py.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_c import fully_shard
from fsdp_c._engines import lent_shards
from fsdp_c._units.cuts import like_dtensor
from helpers.distributed import TEST_DEVICE, distributed, varied
from helpers.models import MLP, Block
from helpers.rows import in_either_api


class Uneven(nn.Module):
    """Ranks have parts of different sizes, and one of them none of a bias.

    A parameter is never used, and one is used in the second step only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.last = nn.Linear(5, 1)
        self.late = nn.Parameter(torch.full((3,), 0.5))
        self.unused = nn.Parameter(torch.ones(2, 2))
        self.num_steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_steps += 1
        if self.num_steps > 1:
            x = x * self.late
        return self.last(torch.relu(self.first(x)))


class _Seen(TorchDispatchMode):
    """Notes the operators that compute with DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            self.operators.add(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _with_dtensors() -> Iterator[None]:
    """Let torch step DTensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lent_shards, "_BORROWERS", {})
        yield


def _model() -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(Uneven().to(TEST_DEVICE))


def _backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator(TEST_DEVICE).manual_seed(step)
    batch = torch.randn(4, 3, generator=generator, device=TEST_DEVICE)
    model(batch).square().mean().backward()


Trained = tuple[nn.Module, optim.Optimizer]


def _train(model: nn.Module, optimizer: optim.Optimizer, num_steps: int = 3) -> Trained:
    for step in range(num_steps):
        _backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _assert_same(value: Any, expected: Any) -> None:
    assert type(value) is type(expected)
    if isinstance(value, DTensor):
        assert value.placements == expected.placements
        assert value.device_mesh == expected.device_mesh
        assert value.shape == expected.shape
        assert value.stride() == expected.stride()
        assert value.requires_grad == expected.requires_grad
        value, expected = value.to_local(), expected.to_local()
    if isinstance(value, Tensor):
        torch.testing.assert_close(value, expected, rtol=0, atol=0)
    else:
        assert value == expected


# Of steps: of backward, and of Adagrad's constructor.
_OUTSIDE = {"aten.detach.default", "aten.full_like.default"}


def _assert_as_dtensors(run: Callable[[], Trained], *, is_lent: bool = True) -> None:
    """Compare the parameters, states and groups with those of steps of DTensors."""
    with _Seen() as seen:
        model, optimizer = run()
    assert (seen.operators <= _OUTSIDE) == is_lent
    with _with_dtensors(), _Seen() as seen:
        other, expected = run()
    assert not seen.operators <= _OUTSIDE
    for param, its in zip(model.parameters(), other.parameters(), strict=True):
        _assert_same(param, its)
        if its not in expected.state:
            assert param not in optimizer.state
            continue
        state, its_state = optimizer.state[param], expected.state[its]
        assert type(state) is dict
        assert list(state) == list(its_state)
        for name, value in state.items():
            _assert_same(value, its_state[name])
    groups = [
        [{**group, "params": len(group["params"])} for group in each.param_groups]
        for each in (optimizer, expected)
    ]
    assert groups[0] == groups[1]


_OPTIONS: dict[type[optim.Optimizer], list[dict[str, Any]]] = {
    optim.ASGD: [{"weight_decay": 0.1}],
    optim.Adadelta: [{"weight_decay": 0.1}],
    optim.Adagrad: [{"lr_decay": 0.1}],
    optim.Adam: [{}, {"amsgrad": True, "weight_decay": 0.1}],
    optim.AdamW: [{"lr": 0.1}, {"maximize": True}],
    optim.Adamax: [{}],
    optim.NAdam: [{"momentum_decay": 0.01}],
    optim.RAdam: [{"lr": 0.1}],
    optim.RMSprop: [{"momentum": 0.9, "centered": True}],
    optim.SGD: [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True}],
}
_FUSED = (optim.Adam, optim.AdamW)


@distributed(world_size=2)
def test_every_optimizer() -> None:
    """Each class, with its options, with loops and foreach and fused."""
    assert {*_OPTIONS, optim.Rprop} == set(lent_shards._BORROWERS)
    for kind, all_options in _OPTIONS.items():
        ways: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}]
        if kind in _FUSED:
            ways.append({"fused": True})
        for options in [{**each, **way} for each in all_options for way in ways]:

            def run(kind: Any = kind, options: Any = options) -> Trained:
                model = _model()
                return _train(model, kind(model.parameters(), **options))

            _assert_as_dtensors(run)


def _rprop(params: Any) -> optim.Optimizer:
    return optim.Rprop(params, lr=0.01)


def _fused_sgd(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9, fused=True)


def _fused_adagrad(params: Any) -> optim.Optimizer:
    return optim.Adagrad(params, lr=0.1, fused=True)


@varied(make=[_rprop, _fused_sgd, _fused_adagrad])
@distributed(world_size=2)
def test_what_dtensors_refuse(make: Callable[[Any], optim.Optimizer]) -> None:
    """DTensors lack operators of these."""
    in_either_api("fully_shard", MLP, {Block}, optimizer=make).train(4)


def _adamw(params: Any) -> optim.Optimizer:
    return optim.AdamW(params, lr=0.1)


class _Scaled(optim.AdamW):
    """Steps by the norm of a whole parameter, which a shard does not have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(1 + 0.1 * param.grad.norm())


@distributed(world_size=2)
def test_subclasses() -> None:
    """They step DTensors."""
    in_either_api("fully_shard", MLP, {Block}, optimizer=_Scaled).train(2)


@distributed(world_size=2)
def test_hooks() -> None:
    """Those before a step set gradients; those behind it see the optimizer's state."""

    def halve(optimizer: optim.Optimizer, *_: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad = like_dtensor(param.grad.to_local() / 2, param)

    def look(optimizer: optim.Optimizer, *_: Any) -> None:
        assert type(optimizer) is optim.AdamW
        for param, state in optimizer.state.items():
            average = state["exp_avg"]
            state["exp_avg"] = like_dtensor(average.to_local() * 2, param)

    def run() -> Trained:
        model = _model()
        optimizer = _adamw(model.parameters())
        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(look)
        return _train(model, optimizer)

    _assert_as_dtensors(run)


@distributed(world_size=2)
def test_closures() -> None:
    """The gradients are those of the closure."""

    def run() -> Trained:
        model = _model()
        optimizer = _adamw(model.parameters())
        for step in range(3):

            def closure(step: int = step) -> int:
                optimizer.zero_grad()
                _backward(model, step)
                return step

            assert optimizer.step(closure) == step
        return model, optimizer

    _assert_as_dtensors(run)


class _InterruptError(Exception):
    pass


def _interrupt() -> None:
    raise _InterruptError


@distributed(world_size=2)
def test_exceptions() -> None:
    """One in a step leaves the optimizer as it was."""

    def run() -> Trained:
        model = _model()
        optimizer = _adamw(model.parameters())
        for _ in range(2):
            with pytest.raises(_InterruptError):
                optimizer.step(_interrupt)
            _train(model, optimizer, 2)
        return model, optimizer

    _assert_as_dtensors(run)


@distributed(world_size=2)
def test_plain_parameters_beside() -> None:
    """They are stepped in the same groups, which torch refuses with foreach."""
    model = _model()
    beside = nn.Parameter(torch.ones(3, device=TEST_DEVICE))
    alone = nn.Parameter(torch.ones(3, device=TEST_DEVICE))
    optimizers = [
        optim.AdamW(params, lr=0.1, foreach=True)
        for params in ([*model.parameters(), beside], [alone])
    ]
    for step in range(3):
        _backward(model, step)
        for param in (beside, alone):
            param.grad = torch.full_like(param, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _assert_same(beside, alone)
    _assert_same(
        optimizers[0].state[beside]["exp_avg"], optimizers[1].state[alone]["exp_avg"]
    )


@distributed(world_size=2)
def test_states_are_followed() -> None:
    """Loaded ones, new groups, schedulers."""

    def run() -> Trained:
        model = _model()
        first, late = list(model.parameters())[:2], list(model.parameters())[2:]
        optimizer = optim.SGD(first, lr=0.1, momentum=0.9)
        _train(model, optimizer, 1)
        optimizer.add_param_group({"params": late, "lr": 0.2})
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        _train(model, optimizer, 1)
        scheduler.step()
        state = optimizer.state_dict()
        optimizer = optim.SGD([{"params": first}, {"params": late}], lr=1.0)
        optimizer.load_state_dict(state)
        return _train(model, optimizer)

    _assert_as_dtensors(run)


@distributed(world_size=2)
def test_saved_parameters() -> None:
    """A graph that has saved a parameter does not go on with its new values."""
    model = _model()
    _backward(model, 0)
    penalty = model.first.weight.square().sum()
    _adamw(model.parameters()).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


@distributed(world_size=2)
def test_other_placements(rank: int) -> None:
    """Torch moves a gradient that lies otherwise than its parameter: a sum, say."""

    def run() -> Trained:
        model = _model()
        mesh = model.first.weight.device_mesh
        whole = torch.ones(2, 2, device=TEST_DEVICE)
        param = nn.Parameter(DTensor.from_local(whole.clone(), mesh, [Replicate()]))
        model.last.register_parameter("beside", param)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        param.grad = DTensor.from_local((rank + 1) * whole, mesh, [Partial()])
        optimizer.step()
        assert torch.equal(param.to_local(), whole - 0.1 * 3)
        return model, optimizer

    _assert_as_dtensors(run, is_lent=False)


@distributed(world_size=2)
def test_nothing_stays() -> None:
    """What stands for the optimizer in a step, and holds gradients, goes with it."""
    model = _model()
    optimizer = _adamw(model.parameters())
    gc.disable()
    for closure in (None, _interrupt):
        _backward(model, 0)
        with contextlib.suppress(_InterruptError):
            optimizer.step(closure)
        for each in gc.get_objects():
            assert not isinstance(each, lent_shards._Borrower)
    gc.enable()
