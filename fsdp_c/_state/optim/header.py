"""Headers: what an optimizer state dict holds, without the tensors' elements.

Loading begins with it: names, shapes and groups are checked, on all ranks alike,
before anything is moved or changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_c._state.optim.agreement import PerRank, Scalar, packed_value, unpacked_value
from fsdp_c._state.optim.local import LOCAL_PARTS
from fsdp_c._state.optim.save import RANK_STATES, STATE_CLASSES, WHOLE_STATES
from fsdp_c._state.optim.states import ParamState
from fsdp_c._state.parts import ParamPart
from fsdp_c._state.sharded_tensors import is_sharded, sharded_dtype, sharded_shape


class StateInfo(NamedTuple):
    """A tensor with dimensions: its shape and dtype, and whether it is sharded."""

    shape: torch.Size
    dtype: torch.dtype
    is_sharded: bool
    # It, of another shape than its parameter, if each rank has the whole of that.
    whole: Tensor | None = None


@dataclass
class Header:
    """A full or sharded optimizer state dict without its tensors."""

    states: dict[str, dict[str, Any]]  # by parameter: StateInfos and plain states
    param_groups: list[dict[str, Any]] | None  # None if it has none
    others: dict[Any, Any] = field(default_factory=dict)  # of no parameter
    # By parameter: states that were of classes of their own.
    classes: dict[str, dict[str, str]] = field(default_factory=dict)


def read_header(state_dict: Any, parts: Mapping[str, ParamPart]) -> Header:
    """Return the header of what :func:`fsdp_c._state.optim.save.save` returned.

    Entries that are neither of the model's ``parts`` nor in a group belong to no
    parameter.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            "the optimizer state dict must be a dict with 'state' and 'param_groups', "
            f"got {type(state_dict).__name__}: with rank0_only, rank 0 must have it"
        )
    if "state" not in state_dict:
        raise ValueError(
            '`optim_state_dict` must have the keys "state" to be a valid optimizer '
            f"state dict, got the keys {sorted(map(str, state_dict))}"
        )
    if LOCAL_PARTS in state_dict:
        raise ValueError(
            "this is a local optimizer state dict: load it with "
            "StateDictType.LOCAL_STATE_DICT, on the rank that saved it"
        )
    groups = state_dict.get("param_groups")
    known = {name: part for part in parts.values() for name in part.names}
    in_groups = {name for group in groups or () for name in group["params"]}
    for key in (*state_dict["state"], *in_groups):
        if isinstance(key, int):
            raise ValueError(
                f"the optimizer state dict is keyed by parameter ids ({key}): give "
                "them names with rekey_optim_state_dict(..., "
                "OptimStateKeyType.PARAM_NAME, ...)"
            )
    whole = state_dict.get(WHOLE_STATES, {})
    per_rank = state_dict.get(RANK_STATES, {})
    header = Header({}, None if groups is None else list(groups))
    header.classes = dict(state_dict.get(STATE_CLASSES, {}))
    for key, value in state_dict["state"].items():
        if key in known or key in in_groups:
            if not isinstance(value, Mapping):
                raise ValueError(
                    f"the optimizer state of parameter {key!r} must be a dict of its "
                    f"states, got {type(value).__name__}"
                )
            header.states[key] = {
                name: _info(each, known.get(key), name in whole.get(key, ()))
                for name, each in value.items()
            }
            for name, values in per_rank.get(key, {}).items():
                first = header.states[key].get(name)
                header.states[key][name] = PerRank(
                    tuple(_as_scalar(each, first) for each in values)
                )
        else:
            header.others[key] = value
    return header


def _as_scalar(value: Any, first: Any) -> Any:
    """Return a rank's value, packed; numbers stand for 0-dim tensors as the first."""
    if isinstance(first, Scalar) and isinstance(value, (bool, int, float)):
        return Scalar(first.dtype, value)
    return packed_value(value)


def _info(value: Any, part: ParamPart | None, is_whole: bool) -> Any:
    if is_sharded(value):
        return StateInfo(sharded_shape(value), sharded_dtype(value), is_sharded=True)
    if not isinstance(value, Tensor) or value.dim() == 0 or is_whole:
        return packed_value(value)
    info = StateInfo(value.shape, value.dtype, is_sharded=False)
    if part is None or part.shard_group is not None or part.is_flat:
        return info
    is_other = value.shape != part.shape
    return info._replace(whole=packed_value(value)) if is_other else info


@dataclass
class WantedState(ParamState):
    """The state that one parameter is to have; its tensors have no memory yet."""

    name: str = field(kw_only=True)  # of the parameter in the state dict
    infos: dict[str, StateInfo] = field(default_factory=dict)  # of the tensors


def check_header(
    header: Header, parts: Mapping[str, ParamPart]
) -> dict[str, WantedState]:
    """Return what each parameter is to have, by first name, if that fits the model."""
    by_name = {name: part for part in parts.values() for name in part.names}
    for name in header.states:
        if name not in by_name:
            raise ValueError(
                f"there is optimizer state for parameter {name!r}, which is not in "
                "the model: load it into the model that it was saved from, or take "
                "the parameter out of the state dict"
            )
    sharded_names, scalar_names = _kinds(header, by_name)
    wanted: dict[str, WantedState] = {}
    for name, values in header.states.items():
        part = by_name[name]
        if part.fqn in wanted:
            raise ValueError(
                f"there is optimizer state for {wanted[part.fqn].name!r} and for "
                f"{name!r}, which are one parameter: leave one of them out"
            )
        each = wanted[part.fqn] = WantedState(part, name=name)
        for key in sorted(values, key=str):
            value = values[key]
            info = _as_sharded(part, key, value, sharded_names, scalar_names)
            if info is not None:
                _check_shape(name, part, key, info, sharded_names)
            if info is None or info.shape != part.shape:
                own = value if info is None else info.whole
                own = own.of(part, key) if isinstance(own, PerRank) else own
                each.plain[key] = unpacked_value(own)
            else:
                each.infos[key] = info
                each.sharded[key] = torch.empty(
                    part.part_numel, dtype=info.dtype, device="meta"
                )
    # Not in the order of the dictionary, which is each rank's own.
    return {fqn: wanted[fqn] for fqn in parts if fqn in wanted}


def _kinds(
    header: Header, by_name: Mapping[str, ParamPart]
) -> tuple[set[str], set[str]]:
    """Return the names of states with one value per element, and of scalar ones."""
    sharded, scalar = set(), {"step"}
    for name, state in header.states.items():
        shape = by_name[name].shape
        for key, value in state.items():
            if isinstance(value, StateInfo) and value.shape == shape:
                sharded.add(key)
            elif shape and not isinstance(value, StateInfo):
                scalar.add(key)
    return sharded, scalar - sharded


def _as_sharded(
    part: ParamPart, key: str, value: Any, sharded: set[str], scalar: set[str]
) -> StateInfo | None:
    """Return the info of a state that may have one value per element."""
    if isinstance(value, StateInfo):
        return value
    dtype = getattr(value, "dtype", None)  # of a Scalar or a tensor
    if dtype is None or (isinstance(value, Tensor) and value.dim() > 0):
        return None
    if part.shape:
        return StateInfo(torch.Size(), dtype, False) if key in sharded else None
    return None if key in scalar else StateInfo(torch.Size(), dtype, False)


def _check_shape(
    name: str, part: ParamPart, key: str, info: StateInfo, sharded: set[str]
) -> None:
    if info.shape == part.shape:
        return
    if info.whole is not None and key not in sharded:
        return  # the optimizer sees the whole parameter, as without sharding
    raise ValueError(
        f"optimizer state {key!r} of parameter {name!r} has shape "
        f"{tuple(info.shape)}, expected {tuple(part.shape)}: load a state dict of "
        "the same model and optimizer (state without one value per element, such as "
        "row and column factors, cannot be loaded into a sharded parameter)"
    )
