"""Optimizer states of tensor classes of their own, such as torchao's 8-bit ones.

Note [States of other classes]
Such a state may only wrap other tensors, of any shapes. Two operators are enough for
all of them, those with which torch's checkpoints take and give it: ``copy_`` into a
plain tensor yields its values, and ``copy_`` from one brings values back. State dicts
hold the values, which are cut as other states are. Loading fills a state that the
optimizer itself made, so the class is the one that the optimizer has on this rank: it
may depend on the size of the rank's part. Where nothing has to be cut, a checkpoint
keeps the inner tensors as they are.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_c._units.cuts import as_dtensor, copied_values, has_values, local_of

_PLAIN = (Tensor, nn.Parameter)


def special_tensor(value: Any) -> Tensor | None:
    """Return the local tensor of a state, if it is of a class of its own."""
    if not isinstance(value, Tensor):
        return None
    local = local_of(value)
    return None if type(local) in _PLAIN else local


def class_name(tensor: Tensor) -> str:
    cls = type(tensor)
    return f"{cls.__module__}.{cls.__qualname__}"


def optimizer_name(optim: object) -> str:
    """Return its class's name; of one that holds others, theirs."""
    return getattr(optim, "held_name", type(optim).__name__)


def steps_wholes(optim: object) -> bool:
    """Whether state that is not element-wise is of whole parameters, sharded or not."""
    return getattr(optim, "steps_wholes", False)


def describe_state(optim: object, name: str, param: str) -> str:
    """Return a state's name in messages; ``param`` is that of its parameter."""
    return f"{optimizer_name(optim)}'s state {name!r} of parameter {param}"


def refusal(what: str, tensor: Tensor) -> str:
    """Return why a state of a class without values cannot be saved."""
    return (
        f"{what} is a {class_name(tensor)}, which cannot be saved: its class does not "
        "implement copy_ into a plain tensor. Use an optimizer whose state is plain "
        "tensors, or implement aten.copy_ in the class"
    )


def values_of(what: str, tensor: Tensor) -> Tensor:
    """Return the values of a special tensor in a plain one; ``what`` names it.

    Raises:
        TypeError: Its class has none.
    """
    if not has_values(tensor):
        raise TypeError(refusal(what, tensor))
    return copied_values(tensor)


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a special tensor wraps; those may be special, too.

    Empty for a class that does not say so. One with memory wraps the plain one of it.
    """
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return {name: getattr(tensor, name) for name in names}
    if tensor.layout is torch.strided and _has_memory(tensor):
        return {"": tensor.detach().as_subclass(Tensor)}
    return {}


def _has_memory(tensor: Tensor) -> bool:
    try:
        return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.itemsize
    except (RuntimeError, NotImplementedError):
        return False


def cloned(tensor: Tensor) -> Tensor:
    """Return a copy of a special tensor, of its class."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.detach().clone().as_subclass(type(tensor))
    inner = {
        name: each.clone() if type(each) in _PLAIN else cloned(each)
        for name, each in inner_tensors(tensor).items()
    }
    _, context = tensor.__tensor_flatten__()
    result: Tensor = type(tensor).__tensor_unflatten__(
        inner, context, tensor.shape, tensor.stride()
    )
    return result


def filled(like: Tensor, value: Tensor) -> Tensor:
    """Return a state such as ``like``, which is special, with the values of ``value``.

    Both are DTensors, or none is.
    """
    local = special_tensor(like)
    assert local is not None
    values = local_of(value)
    new = cloned(local)
    with torch.no_grad():
        new.copy_(values.reshape(new.shape).to(new.device))
    return rewrapped(like, new)


def rewrapped(like: Tensor, local: Tensor) -> Tensor:
    """Return ``local`` as a DTensor such as ``like``, if that is one."""
    if not isinstance(like, DTensor):
        return local
    return as_dtensor(local, like.shape, like.device_mesh, tuple(like.placements))


def copy_of(optim: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of an optimizer, with the same parameters and no hooks."""
    other = object.__new__(type(optim))
    for name, value in vars(optim).items():
        if name.endswith("_hooks"):
            vars(other)[name] = OrderedDict()
        elif name != "step":  # a learning rate scheduler's, which counts
            is_shared = not isinstance(value, (dict, list))
            vars(other)[name] = value if is_shared else value.copy()
    return other


def first_state(optim: torch.optim.Optimizer, param: nn.Parameter) -> dict[str, Any]:
    """Return the state that the first step of ``optim`` makes for ``param``.

    Another optimizer of the class steps a copy of ``param``, so nothing changes.

    Raises:
        ValueError: Such a step fails.
    """
    stand_in = nn.Parameter(param.detach().clone())
    stand_in.grad = torch.zeros_like(stand_in)
    group = next(
        group
        for group in optim.param_groups
        if any(each is param for each in group["params"])
    )
    other = copy_of(optim)
    other.param_groups = [{**group, "params": [stand_in]}]
    other.state = defaultdict(dict)
    try:
        type(optim).step(other)
    except Exception as error:
        raise ValueError(
            f"{type(optim).__name__} has no state yet, and the classes of its states "
            f"are not known before its first step, which fails without a loss "
            f"({error!r:.200}): take one step before loading"
        ) from error
    return dict(other.state[stand_in])


class StateClasses:
    """The classes that an optimizer's states have, or would have, on this rank."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._optim = optim
        self._first: dict[nn.Parameter, dict[str, Any]] = {}

    def like(self, param: nn.Parameter, name: str, *, is_special: bool) -> Any:
        """Return the state that the optimizer has, or would make.

        None if it has none, and none of the ranks that saved had a special one, which
        ``is_special`` says.
        """
        own = self._optim.state.get(param, {})
        if name in own or not is_special or param.numel() == 0:
            return own.get(name)
        if param not in self._first:
            self._first[param] = first_state(self._optim, param)
        return self._first[param].get(name)

    def restore(
        self, param: nn.Parameter, state: dict[str, Any], special: Collection[str]
    ) -> None:
        """Give the states of a parameter their classes.

        ``state`` holds values; ``special`` names those that a rank had in a class.
        """
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.is_meta:
                continue
            like = self.like(param, name, is_special=name in special)
            if special_tensor(like) is not None and special_tensor(value) is None:
                state[name] = filled(like, value)


@contextmanager
def keeping_classes(optim: torch.optim.Optimizer) -> Iterator[None]:
    """Give what is loaded meanwhile the classes that the states have."""
    states = [
        (param, name, value)
        for param, state in optim.state.items()
        for name, value in state.items()
        if special_tensor(value) is not None
    ]
    yield
    for param, name, like in states:
        value = optim.state[param].get(name)
        if isinstance(value, Tensor) and special_tensor(value) is None:
            optim.state[param][name] = filled(like, value)
