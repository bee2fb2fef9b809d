"""Outputs that are any objects: the tensors that they refer to are found."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import distributed
from helpers.impl import fsdp
from helpers.models import DIM
from helpers.reference import Differential

pytestmark = pytest.mark.bookkeeping


class _Plain:
    """Attributes in a ``__dict__``, one of them the object itself."""

    def __init__(self, hidden: Tensor, logits: Tensor) -> None:
        self.hidden = hidden
        self.label = "x"
        self.rest = {"logits": [logits], "own": self}


class _Base:
    __slots__ = ("__logits",)

    def __init__(self, logits: Tensor) -> None:
        self.__logits = logits

    @property
    def logits(self) -> Tensor:
        return self.__logits


class _Slots(_Base):
    """Slots of two classes, one of a private name and one that is not set."""

    __slots__ = ("hidden", "unset")

    def __init__(self, hidden: Tensor, logits: Tensor) -> None:
        super().__init__(logits)
        self.hidden = hidden

    def pair(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.logits


class _Holder:
    """Objects in an object, in a cycle; the module that made them as well."""

    def __init__(self, module: nn.Module, inner: _Slots) -> None:
        self.module = module
        self.inner = [inner, self]
        self.pair = (self.inner, inner)


class _Raises:
    """Attributes only, past code that must not run."""

    def __init__(self, hidden: Tensor, logits: Tensor) -> None:
        vars(self).update(hidden=hidden, logits=logits)

    def __getattribute__(self, name: str) -> Any:
        if name in ("__dict__", "__class__", "hidden", "logits"):
            return object.__getattribute__(self, name)
        raise RuntimeError(name)


class _List(list):  # type: ignore[type-arg]
    """One tensor as an item, both as attributes."""

    def __init__(self, hidden: Tensor, logits: Tensor) -> None:
        super().__init__([hidden])
        self.hidden, self.logits = hidden, logits


def _generate(*tensors: Tensor) -> Iterator[Tensor]:
    yield from tensors


def _pack(kind: str, module: nn.Module, hidden: Tensor, logits: Tensor) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "plain": lambda: _Plain(hidden, logits),
        "slots": lambda: _Slots(hidden, logits),
        "cycle": lambda: _Holder(module, _Slots(hidden, logits)),
        "raises": lambda: _Raises(hidden, logits),
        "in a tuple": lambda: ("x", {"y": _Plain(hidden, logits)}),
        "distribution": lambda: torch.distributions.Normal(
            hidden, logits.square() + 1, validate_args=False
        ),
        "deque": lambda: deque([hidden, logits]),
        "iterator": lambda: zip([hidden], [logits], strict=True),
        "generator": lambda: _generate(hidden, logits),
        "function": lambda: lambda: (hidden, logits),
        "method": lambda: _Slots(hidden, logits).pair,
        "partial": lambda: partial(torch.stack, (hidden, logits)),
        "exception": lambda: ValueError(hidden, logits),
        "view": {"hidden": hidden, "logits": logits}.values,
        "list": lambda: _List(hidden, logits),
    }
    return made[kind]()


def _unpack(kind: str, output: Any) -> tuple[Tensor, Tensor]:
    if kind == "in a tuple":
        output = output[1]["y"]
    if kind == "cycle":
        output = output.inner[0]
    if kind == "distribution":
        return output.loc, output.scale
    if kind == "exception":
        output = output.args
    if kind == "iterator":
        output = next(output)
    if kind in CALLED:
        output = output()
    if kind in PAIRS:
        hidden, logits = output
        return hidden, logits
    if isinstance(output, _Plain):
        return output.hidden, output.rest["logits"][0]
    return output.hidden, output.logits


CALLED = ("function", "method", "partial")
PAIRS = ("deque", "iterator", "generator", "exception", "view", *CALLED)
KINDS = (
    *("plain", "slots", "cycle", "raises", "in a tuple", "distribution", "list"),
    *PAIRS,
)


class _Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc1 = nn.Linear(DIM, DIM)
        self.fc2 = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.fc1(x))
        return _pack(self.kind, self, hidden, self.fc2(hidden))


class _Net(nn.Module):
    def __init__(self, kind: str, used: int) -> None:
        super().__init__()
        self.used = used
        self.blocks = nn.ModuleList(_Block(kind) for _ in range(2))
        self.out = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = _unpack(block.kind, block(x))[self.used]
        return self.out(x)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@distributed(world_size=2)
def test_training(kind: str, used: int, use_orig_params: bool) -> None:
    """Backward starts from whichever tensor of the object is used."""
    differential = Differential.of_units(
        lambda: _Net(kind, used), {_Block}, use_orig_params=use_orig_params
    )
    differential.train(3)


class _Fixed(nn.Module):
    """Returns what it was given beside a number that depends on its parameter."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.make((x * self.weight).sum())


class _Many:
    """More objects than a search looks at, before the loss."""

    def __init__(self, loss: Tensor) -> None:
        self.parts = [*([i] for i in range(20_000)), [loss]]

    @property
    def loss(self) -> Any:
        return self.parts[-1][0]


@distributed(world_size=2)
def test_objects_that_are_too_large() -> None:
    """The error names the unit and the type; tensors beside it are enough."""
    model = fsdp(_Fixed(_Many), use_orig_params=True)
    message = (
        r"FSDP unit '_Fixed': no tensor that requires grad was found in the output "
        r"of its forward, a _Many that holds too many objects to search: return the "
        r"tensors in a tuple, dict or dataclass"
    )
    with pytest.raises(TypeError, match=message):
        model(torch.ones(4))
    with torch.no_grad():
        assert model(torch.ones(4)).loss == 4
    beside = fsdp(_Fixed(lambda loss: (loss, _Many(loss))), use_orig_params=True)
    beside(torch.ones(4))[0].backward()
    for param in beside.parameters():
        if param.numel() > 0:  # this rank holds a part
            assert torch.equal(param.grad, torch.ones_like(param))


@distributed(world_size=2)
def test_objects_without_tensors() -> None:
    """What holds none is left alone, whatever it is; nothing of it runs."""

    def generate() -> Iterator[int]:
        raise AssertionError
        yield 1

    class Sized:
        def __len__(self) -> int:
            raise AssertionError

        def __iter__(self) -> Iterator[int]:
            raise AssertionError

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    for value in (generate(), generate, torch, Sized(), object(), range(10**9)):
        model = fsdp(_Fixed(lambda _, value=value: value), use_orig_params=True)
        assert model(torch.ones(4)) is value


@distributed(world_size=2)
def test_leaves_are_not_hooked() -> None:
    """An object that leads to parameters and inputs gives them no hooks."""

    class Holder:
        def __init__(self, *held: Any) -> None:
            self.held = held

    given = torch.ones(4, requires_grad=True)
    model = fsdp(_Fixed(lambda loss: Holder(given, loss)), use_orig_params=True)
    for _ in range(2):
        loss = model(torch.ones(4)).held[1]
        assert given._backward_hooks is None
        assert len(loss._backward_hooks) == 1
        loss.backward()


@distributed(world_size=2)
def test_a_tensor_found_twice_is_hooked_once() -> None:
    """As an item and as an attribute of one container."""
    model = fsdp(_Fixed(lambda loss: _List(loss, loss)), use_orig_params=True)
    loss = model(torch.ones(4)).logits
    assert len(loss._backward_hooks) == 1


@distributed(world_size=2)
def test_functions_do_not_lead_to_the_program() -> None:
    """Their globals are passed by, and so are frames: all else is soon visited."""

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        fail()
    for value in (_pack, caught.value, caught.value.__traceback__, caught.tb.tb_frame):
        model = fsdp(_Fixed(lambda _, value=value: value), use_orig_params=True)
        assert model(torch.ones(4)) is value
