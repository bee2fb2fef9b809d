"""Optimizer states by parameter name: this rank's part, taken out and put back.

The state of a parameter is *sharded* where it has one value per element of what the
optimizer steps (momenta), and *plain* otherwise (step counters, numbers, factors):
each rank has its own plain state and they are normally equal. A name is one or the
other for all parameters. Nothing here communicates.
"""

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_c._state.optim.classes import (
    class_name,
    describe_state,
    optimizer_name,
    special_tensor,
    values_of,
)
from fsdp_c._state.optim.groups import groups_by_name
from fsdp_c._state.optim.keys import Key, ParamKeys, keys_of_optimizer, uses_names
from fsdp_c._state.parts import ParamPart, find_parts


@dataclass
class ParamState:
    """The state of one parameter on this rank."""

    part: ParamPart
    # One value per element of this rank's part, 1-D, of any dtype.
    sharded: dict[str, Tensor] = field(default_factory=dict)
    # Everything else; tensors of any shape, numbers, objects.
    plain: dict[str, Any] = field(default_factory=dict)
    has_state: bool = False  # the optimizer has any for it on this rank
    # Those of `sharded` that are of a class of their own, as the optimizer has them;
    # see Note [States of other classes]. Their values come with give_values().
    special: dict[str, Tensor] = field(default_factory=dict)


class OptimStates(NamedTuple):
    """What an optimizer holds on this rank, by parameter name."""

    # By first name; all parameters that the optimizer steps, units first and in the
    # same order on all ranks.
    states: dict[str, ParamState]
    param_groups: list[dict[str, Any]] | None  # "params" are names; None if unknown
    others: dict[Any, Any]  # state that belongs to no parameter, by its key


def collect(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    *,
    parts: Mapping[str, ParamPart] | None = None,
    state_dict: Mapping[str, Any] | None = None,
    keys: ParamKeys | None = None,
) -> OptimStates:
    """Return the states of ``optim`` by parameter name; the tensors are its own.

    By default ``parts`` are those of the units in ``model``, ``state_dict`` is
    ``optim.state_dict()``, and ``keys`` are those in it. Warns of what else is in it.

    Raises:
        ValueError: It has no states.
    """
    if parts is None:
        parts = find_parts(model)
    if state_dict is None:
        state_dict = optim.state_dict()
    _check_entries(optim, state_dict)
    if keys is None:
        keys = keys_of_optimizer(model, optim, is_named=uses_names(state_dict))
    keys = keys.with_parts(parts)
    given: Mapping[Any, Any] = state_dict.get("state", {})
    plain = {
        name
        for key, its_parts in keys.parts.items()
        for name, value in (given.get(key) or {}).items()
        if isinstance(value, Tensor)
        and value.dim() > 0
        and value.numel() > 0
        and not _fits(value, its_parts[0])
    }
    # A WholeParameterOptimizer knows wholes; here, parts have such shapes by chance.
    plain.update(getattr(optim, "_plain_state_names", ()))
    states: dict[str, ParamState] = {}
    for fqn, part in parts.items():
        if part.param not in keys.key_of_param:
            continue
        own = given.get(keys.key_of_param[part.param]) or {}
        state = states[fqn] = ParamState(part, has_state=bool(own))
        for name, value in own.items():
            # Names in `plain` do not fit other parameters.
            fits = name not in plain and _fits(value, part)
            special = special_tensor(value)
            if special is not None:
                if not fits:
                    raise TypeError(
                        f"{describe_state(optim, name, repr(fqn))} is a "
                        f"{class_name(special)} of shape {tuple(value.shape)}, which "
                        "cannot be saved: it has not one value per element of the "
                        "parameter. Use an optimizer whose state is plain tensors"
                    )
                state.special[name] = special
            elif fits:
                state.sharded[name] = part.home.part_in(value.detach())
            else:
                state.plain[name] = value
    _move_scalars(states.values())
    return OptimStates(
        states,
        groups_by_name(state_dict, keys),
        {k: v for k, v in given.items() if k not in keys.param_of_key},
    )


def _check_entries(optim: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    what = f"the state dict of {optimizer_name(optim)}"
    if "state" not in state_dict:
        raise ValueError(
            f"{what} has {sorted(map(str, state_dict))} and no 'state': an optimizer "
            "that wraps another one cannot be saved by parameter names"
        )
    entries = [key for key in state_dict if key not in ("state", "param_groups")]
    if entries:
        warnings.warn(
            f"{what} has {', '.join(map(repr, entries))}, which is not saved with the "
            "states of parameters: save it beside them",
            stacklevel=5,
        )


def give_values(
    optim: torch.optim.Optimizer,
    states: Mapping[str, ParamState],
    only: Callable[[ParamState], bool] = lambda _: True,
) -> None:
    """Let ``sharded`` have the values of what is of a class of its own.

    Raises:
        TypeError: A class has no values.
    """
    known: dict[int, Tensor] = {}  # parts of a flat parameter have one state
    for fqn, state in states.items():
        for name, special in state.special.items() if only(state) else ():
            if id(special) not in known:
                what = describe_state(optim, name, repr(fqn))
                known[id(special)] = values_of(what, special)
            values = known[id(special)]
            state.sharded[name] = state.part.home.part_of_local(values)


def _fits(value: Any, part: ParamPart) -> bool:
    """Whether ``value`` has one element per element of what the optimizer steps."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return False
    if part.is_flat:
        return value.numel() == part.param.numel()
    return value.shape == part.home.state_shape


def _move_scalars(states: Collection[ParamState]) -> None:
    """Move the 0-dim element-wise state of 0-dim parameters to ``sharded``.

    Other parameters decide by name: the state is element-wise if it is sharded in one
    of them, or if none with dimensions has it as plain state. ``step`` never is.
    """
    sharded = {name for state in states for name in state.sharded}
    plain = {name for state in states if state.part.shape for name in state.plain}
    plain = (plain - sharded) | {"step"}
    for state in states:
        part = state.part
        if part.shape or part.shard_group is not None or part.is_flat:
            continue
        for name, value in list(state.plain.items()):
            if name not in plain and isinstance(value, Tensor) and value.dim() == 0:
                state.sharded[name] = part.home.part_in(state.plain.pop(name).detach())


# Into the optimizer's own form ----------------------------------------------


def assemble(keys: ParamKeys, states: Mapping[str, ParamState]) -> dict[Key, Any]:
    """Return the "state" of an optimizer's state dict on this rank.

    A parameter of which this rank holds nothing gets no state, as after a step on this
    rank, unless ``has_state`` is set. Raises ValueError if the parameters of a flat
    parameter differ in their plain state, or in the dtype of their sharded state.
    """
    result: dict[Key, Any] = {}
    for key, parts in keys.parts.items():
        given = [states.get(part.fqn) for part in parts]
        present = [state for state in given if state is not None and state.has_state]
        if not present:
            continue
        if parts[0].is_flat:
            result[key] = _flat_state(parts, given)
        else:
            state = present[0]
            result[key] = {
                **{n: parts[0].home.as_state(v) for n, v in state.sharded.items()},
                **state.plain,
            }
    return result


def _flat_state(
    parts: Sequence[ParamPart], given: Sequence[ParamState | None]
) -> dict[str, Any]:
    """Return the state of a flat parameter; zeros where a parameter has none.

    One without elements has no say: no rank holds it, so saved states may lack it.
    """
    param = parts[0].param
    pairs = [
        (part, ParamState(part) if state is None else state)
        for part, state in zip(parts, given, strict=True)
        if part.shape.numel() > 0
    ]
    parts, states = [part for part, _ in pairs], [state for _, state in pairs]
    result: dict[str, Any] = {}
    for name in dict.fromkeys(n for state in states for n in state.sharded):
        values = [state.sharded.get(name) for state in states]
        present = [value for value in values if value is not None]
        dtypes = {value.dtype for value in present}
        if len(dtypes) > 1 or any(name in state.plain for state in states):
            raise ValueError(_differs(parts, name, values))
        whole = _whole_of_parts(param, parts, values)
        if whole is None:
            whole = present[0].new_zeros(param.shape)
            for part, value in zip(parts, values, strict=True):
                if value is not None:
                    part.home.part_in(whole).copy_(value)
        result[name] = whole
    for name in dict.fromkeys(n for state in states for n in state.plain):
        plain = [state.plain.get(name, _MISSING) for state in states]
        if not all(same_value(value, plain[0]) for value in plain):
            raise ValueError(_differs(parts, name, plain))
        result[name] = plain[0]
    return result


def _whole_of_parts(
    param: nn.Parameter, parts: Sequence[ParamPart], values: Sequence[Tensor | None]
) -> Tensor | None:
    """Return the tensor of ``param``'s shape that ``values`` are the parts of.

    None if there is no such tensor: then they have memory of their own.
    """
    whole: Tensor | None = None
    for part, value in zip(parts, values, strict=True):
        if value is None or value.is_meta or not value.is_contiguous():
            return None
        if value.numel() == 0:
            continue
        if whole is None:
            storage = value.untyped_storage()
            begin = value.storage_offset() - part.home.offset
            end = begin + param.numel()
            if begin < 0 or end * value.element_size() > storage.nbytes():
                return None
            whole = value.new_empty(0).set_(storage, begin, param.shape, (1,))
        if part.home.part_in(whole).data_ptr() != value.data_ptr():
            return None
    return whole


def load_keeping_dtypes(
    optim: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    params: Mapping[Key, nn.Parameter],
) -> None:
    """Load a state dict, of ``params`` by key; but for ``step`` states keep dtypes."""
    states = state_dict["state"]
    copied = {key: copy.copy(state) for key, state in states.items()}
    optim.load_state_dict({**state_dict, "state": copied})
    for key, param in params.items():
        for name, value in states.get(key, {}).items():
            own = optim.state[param]
            loaded = own.get(name)
            if (
                name != "step"
                and isinstance(value, Tensor)
                and isinstance(loaded, Tensor)
                and loaded.dtype != value.dtype
            ):
                own[name] = value.to(loaded.device)


_MISSING: Any = object()


def same_value(first: Any, second: Any) -> bool:
    """Return whether two plain states are equal; NaN is equal to NaN."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and torch.equal(_as_bytes(first), _as_bytes(second))
        )
    if type(first) is not type(second):
        return False
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            same_value(first[key], second[key]) for key in first
        )
    return bool(first == second or (first != first and second != second))  # noqa: PLR0124


def _as_bytes(value: Tensor) -> Tensor:
    flat = value.detach().cpu().reshape(-1).contiguous()
    # One element is contiguous with any stride; Prodigy's slices have such ones.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def describe(value: Any) -> str:
    """Return a plain state in words, for messages."""
    if value is None or value is _MISSING:
        return "no value"
    if isinstance(value, Tensor) and value.dim() > 0:
        return f"{value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, Tensor):
        return f"{value.item()} ({value.dtype})"
    return repr(value)


def _differs(parts: Sequence[ParamPart], name: str, given: Sequence[Any]) -> str:
    values = [describe(value) for value in given]
    first = values[0]
    other = next((i for i, value in enumerate(values) if value != first), 0)
    return (
        "All unflattened parameters comprising a single flat parameter must have "
        "scalar state with the same value and dtype, but state "
        f"{name!r} of {parts[0].fqn!r} is {first} and that of "
        f"{parts[other].fqn!r} is {values[other]}: wrap them in units of their own, "
        "or use use_orig_params=True"
    )
