"""The state of whole parameters, from their owners to where the parts are, and back.

State with one value per element travels as the parameter does; everything else, such as
step counters and factors, is told to all ranks. So a state dict looks like that of an
optimizer over the sharded parameters, and takes the same ways into files.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_c._state.optim.agreement import packed_value, unpacked_value
from fsdp_c._state.optim.classes import describe_state, special_tensor, values_of
from fsdp_c._state.optim.keys import keys_of_input
from fsdp_c._state.optim.states import ParamState, assemble, load_keeping_dtypes
from fsdp_c._state.optim.states import collect as collect_states
from fsdp_c._whole.between_rounds import nested
from fsdp_c._whole.owned import Dealt, Travelling, WholeParam, gather, parts_of, scatter

# By name: the dtype of state with one value per element; None: it is something else.
_Kinds = dict[str, torch.dtype | None]


def states_of_params(optimizer: Optimizer) -> dict[Any, Any]:
    return {k: v for k, v in optimizer.state.items() if isinstance(k, Tensor)}


def other_entries(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer adds to its state dict, such as heavyball's settings."""
    return {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")}


def other_states(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the state that an optimizer keeps by name, such as MADGRAD's "k"."""
    return {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}


def save_states(
    model: nn.Module,
    optimizer: Optimizer,
    dealt: Dealt,
    groups: Sequence[Mapping[str, Any]],
) -> tuple[dict[Tensor, dict[str, Any]], frozenset[str]]:
    """Return the state of the sharded parameters, and what of it is told. Collective.

    ``optimizer`` is this rank's, of wholes; ``groups`` are those of sharded parameters.
    What is told are the names of state that has not one value per element.

    Raises:
        ValueError: It wraps an optimizer that has state of its own.
    """
    for each in nested(optimizer):
        if each.state is not optimizer.state:
            raise ValueError(
                f"{type(optimizer).__name__} keeps its state apart from that of the "
                f"{type(each).__name__} in it, so that no state dict of sharded "
                "parameters has both: save them on their owners, or use an optimizer "
                "whose state is in one place"
            )

    def state_of(whole: WholeParam) -> Mapping[str, Any]:
        return optimizer.state.get(dealt.shown[whole], {}) if whole.is_mine else {}

    def own_values(whole: WholeParam, name: str) -> Tensor | None:
        if not whole.is_mine:
            return None
        return _values(optimizer, name, whole, dealt.shown[whole])

    kinds, plain = _agree(
        dealt,
        lambda whole: {n: _dtype(whole, n, v) for n, v in state_of(whole).items()},
        lambda whole, name: state_of(whole)[name],
    )
    states = {
        whole.part.fqn: ParamState(
            whole.part,
            plain={name: unpacked_value(value) for name, value in values.items()},
            has_state=bool(its) and whole.part.is_stepped,
        )
        for whole, its, values in zip(dealt.wholes, kinds, plain, strict=True)
    }
    for number in range(dealt.num_rounds):
        names, travelling = _of_round(dealt, number, kinds, own_values)
        parts = scatter(travelling, "optimizer states")
        for name, (whole, _, _), part in zip(names, travelling, parts, strict=True):
            # The owner goes on with its own.
            is_own = whole.is_mine and not whole.travels
            device = whole.part.param.device
            states[whole.part.fqn].sharded[name] = part.to(device, copy=is_own)
    keys = keys_of_input(model, groups).with_parts(parts_of(model))
    assembled = assemble(keys, states)
    told = frozenset(n for its in kinds for n, dtype in its.items() if dtype is None)
    return {keys.param_of_key[key]: state for key, state in assembled.items()}, told


def _values(
    optimizer: Optimizer, name: str, whole: WholeParam, shown: nn.Parameter
) -> Tensor:
    own: Tensor = optimizer.state[shown][name]
    if special_tensor(own) is not None:
        own = values_of(describe_state(optimizer, name, repr(whole.part.fqn)), own)
    return own.detach().reshape(-1)


def _dtype(whole: WholeParam, name: str, value: Any) -> torch.dtype | None:
    """Return the dtype of a state with one value per element, or None.

    A 0-dim parameter does not tell its momenta from numbers: others with that name do,
    and ``step`` is a number.
    """
    if not isinstance(value, Tensor) or value.shape != whole.shape:
        return None
    return value.dtype if value.dim() > 0 or name != "step" else None


def _agree(
    dealt: Dealt,
    kinds_of: Callable[[WholeParam], _Kinds],
    value_of: Callable[[WholeParam, str], Any],
) -> tuple[list[_Kinds], list[dict[str, Any]]]:
    """Return the kinds of all states, and the values that are told. Collective.

    A name is of one kind for all parameters: the factors of a square matrix have its
    shape by chance. ``kinds_of`` is empty on ranks that do not report a parameter.
    """
    kinds: list[_Kinds] = dealt.reports(kinds_of)
    told = {name for its in kinds for name, dtype in its.items() if dtype is None}
    kinds = [{n: None if n in told else t for n, t in its.items()} for its in kinds]
    plain = dealt.reports(
        lambda whole: {
            name: packed_value(value_of(whole, name))
            for name in kinds_of(whole)
            if name in told
        }
    )
    return kinds, plain


def _of_round(
    dealt: Dealt,
    number: int,
    kinds: Sequence[_Kinds],
    values_of: Callable[[WholeParam, str], Tensor | None],
) -> tuple[list[str], list[Travelling]]:
    """Return the names of the states that travel in a round, and these."""
    names, travelling = [], []
    for whole, its in zip(dealt.wholes, kinds, strict=True):
        for name, dtype in its.items() if whole.round == number else ():
            if dtype is not None:
                names.append(name)
                travelling.append(Travelling(whole, values_of(whole, name), dtype))
    return names, travelling


def load_states(
    model: nn.Module,
    optimizer: Optimizer,
    dealt: Dealt,
    groups: Sequence[Mapping[str, Any]],
    given: Mapping[int, Mapping[str, Any]],
    others: Mapping[Any, Any],
    entries: Mapping[str, Any],
) -> None:
    """Load the state of the sharded parameters into the owners' optimizers. Collective.

    ``given`` is by position in ``groups``, ``others`` the state of no parameter and
    ``entries`` what else the state dict has; else as :func:`save_states`.
    """
    states = collect_states(
        model,
        optimizer,
        parts=parts_of(model),
        state_dict={"state": given},
        keys=keys_of_input(model, groups),
    ).states
    # On one rank a factor may have the shape of this rank's part by chance.
    told = dealt.union({name for state in states.values() for name in state.plain})

    def kinds_of(whole: WholeParam) -> _Kinds:
        if not whole.is_leader:
            return {}
        state = states[whole.part.fqn]
        return {
            name: None if name in told else state.sharded[name].dtype
            for name in (*state.sharded, *state.plain)
        }

    def value_of(whole: WholeParam, name: str) -> Any:
        state = states[whole.part.fqn]
        return state.plain.get(name, state.sharded.get(name))

    kinds, plain = _agree(dealt, kinds_of, value_of)
    loaded: dict[nn.Parameter, dict[str, Any]] = {
        dealt.shown[whole]: {name: unpacked_value(v) for name, v in values.items()}
        for whole, values in zip(dealt.wholes, plain, strict=True)
        if whole.is_mine
    }
    for number in range(dealt.num_rounds):
        names, travelling = _of_round(
            dealt,
            number,
            kinds,
            lambda whole, name: states[whole.part.fqn].sharded.get(name),
        )
        wholes = gather(travelling, "optimizer states")
        for name, (whole, _, _), values in zip(names, travelling, wholes, strict=True):
            if values is not None:
                is_own = not whole.travels
                own = values.to(whole.part.param.device, copy=is_own)
                loaded[dealt.shown[whole]][name] = own.view(whole.shape)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    owned = {key: loaded[param] for key, param in enumerate(params) if loaded[param]}
    state = {**owned, **others}
    state_dict = {**optimizer.state_dict(), **entries, "state": state}
    load_keeping_dtypes(optimizer, state_dict, dict(enumerate(params)))
