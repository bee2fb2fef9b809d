"""What the optimizer states of all ranks hold together, agreed on by all.

With use_orig_params=True a rank that holds nothing of a parameter has no state for
it, not even its step counter. Hence the ranks tell each other, once a call, which
states they have, and take what is not sharded from a rank that has it.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_c._state.optim.classes import class_name
from fsdp_c._state.optim.states import ParamState, describe, same_value
from fsdp_c._state.parts import ParamPart
from fsdp_c._units.collectives import gathered_objects


class Scalar(NamedTuple):
    """A 0-dim tensor, in a form that is quick to pickle."""

    dtype: torch.dtype
    value: Any


class Sharded(NamedTuple):
    """What a rank has of a state with one value per element.

    ``name`` is that of its class, if it has one of its own.
    """

    dtype: torch.dtype
    name: str | None = None


class PerRank(NamedTuple):
    """A plain state that differs between ranks.

    ``values`` are those of the ranks of the sharding group, as of
    :func:`packed_value`; None where a rank has none.
    """

    values: tuple[Any, ...]

    def of(self, part: ParamPart, key: str) -> Any:
        """Return this rank's value; the first one if the number of ranks differs."""
        group = part.shard_group
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        first = next((value for value in self.values if value is not None), None)
        if len(self.values) == size:
            own = self.values[rank]
            return first if own is None else own
        warnings.warn(
            f"optimizer state {key!r} of parameter {part.fqn!r} differed between the "
            f"{len(self.values)} ranks that saved it, and is loaded on {size} ranks: "
            "every rank gets the first value",
            stacklevel=6,
        )
        return first


def packed_value(value: Any) -> Any:
    """Return a plain state as it is passed to other ranks."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0 and not value.dtype.is_complex:
        return Scalar(value.dtype, value.item())
    return value.detach().cpu()


def unpacked_value(value: Any) -> Any:
    """Return a plain state as the optimizer has it, with memory of its own."""
    if isinstance(value, Scalar):
        return torch.tensor(value.value, dtype=value.dtype, device="cpu")
    return copy.deepcopy(value)


@dataclass
class AgreedState:
    """The state of one parameter, of all ranks together."""

    part: ParamPart
    # The dtypes of those with one value per element.
    sharded: dict[str, torch.dtype] = field(default_factory=dict)
    # The others, as of packed_value(); parameters share them.
    plain: dict[str, Any] = field(default_factory=dict)
    # Those of them that differ between ranks.
    per_rank: dict[str, PerRank] = field(default_factory=dict)
    # Of those in `sharded` that are of a class of their own on some rank, its name.
    classes: dict[str, str] = field(default_factory=dict)


def gather_reports(
    groups: Iterable[ProcessGroup],
    report: Callable[[ProcessGroup], Any],
    error: Exception | None,
    what: str,
) -> list[list[Any]]:
    """Return, for each group, what its ranks report.

    All ranks of the groups must call it; the order of the groups is the same on all.
    Raises ``error``, what went wrong on this rank before, or that of another one.
    """
    gathered = []
    message = None if error is None else str(error)
    for group in groups:
        gathered.append(gathered_objects((message, report(group)), group, what))
    if error is not None:
        raise error
    for reports in gathered:
        for rank, (other, _) in enumerate(reports):
            if other is not None:
                raise RuntimeError(f"rank {rank} of the group: {other}")
    return [[each for _, each in reports] for reports in gathered]


# What one rank has of a parameter: each is Sharded, or a plain state as it is passed.
_Kind = dict[str, Any]

# One rank's, by parameter.
_Report = Mapping[str, _Kind]


def agree(
    states: Mapping[str, ParamState],
    groups: Sequence[ProcessGroup],
    error: Exception | None,
) -> dict[str, AgreedState]:
    """Return the states that the ranks have together; those with none are left out.

    All ranks of ``groups``, which shard, must call it. Parameters whose sharding group
    is another one are left out, unless each rank has the whole. Raises ``error``, or
    if the ranks' optimizers do not fit together.
    """

    def of_group(group: ProcessGroup | None) -> dict[str, ParamState]:
        return {n: s for n, s in states.items() if s.part.shard_group is group}

    gathered = gather_reports(
        groups,
        lambda group: _report(of_group(group)),
        error,
        "comparison of optimizer states",
    )
    agreed: dict[str, AgreedState] = {}
    for group, reports in zip(groups, gathered, strict=True):
        _check_parameters(reports)
        parts = [state.part for state in of_group(group).values()]
        agreed.update((each.part.fqn, each) for each in _agreed_states(parts, reports))
    for name, state in of_group(None).items():
        if state.has_state:
            agreed[name] = AgreedState(
                state.part,
                {key: value.dtype for key, value in state.sharded.items()},
                {key: packed_value(value) for key, value in state.plain.items()},
                classes=_classes(state),
            )
    return {name: agreed[name] for name in states if name in agreed}


def _classes(state: ParamState) -> dict[str, str]:
    return {name: class_name(value) for name, value in state.special.items()}


def _report(states: Mapping[str, ParamState]) -> _Report:
    """Return this rank's states; equal ones are one object, which is pickled once."""
    report: dict[str, _Kind] = {}
    known: dict[tuple[Any, ...], _Kind] = {}
    for name, state in states.items():
        kind: _Kind = {}
        if state.has_state:
            classes = _classes(state)
            kind.update(
                (n, Sharded(value.dtype, classes.get(n)))
                for n, value in state.sharded.items()
            )
            kind.update((n, packed_value(value)) for n, value in state.plain.items())
        if all(isinstance(value, (Sharded, Scalar)) for value in kind.values()):
            # Equal keys are equal kinds, bit for bit: NaN is equal to NaN.
            key = tuple((n, repr(value)) for n, value in kind.items())
            kind = known.setdefault(key, kind)
        report[name] = kind
    return report


def _check_parameters(reports: Sequence[_Report]) -> None:
    stepped = {name for report in reports for name in report}
    for rank, report in enumerate(reports):
        lacking = sorted(stepped - report.keys())
        if lacking:
            raise RuntimeError(
                _missing(f"the optimizer of rank {rank} does not step {lacking[0]!r}")
            )


def _missing(what: str) -> str:
    return (
        "FSDP currently requires each rank to have at least the optimizer states "
        "needed by rank 0's optimizer but some ranks are missing some of those "
        f"states: {what}, unlike other ranks; give the optimizers of all ranks the "
        "same parameters and step them together"
    )


def _agreed_states(
    parts: Sequence[ParamPart], reports: Sequence[_Report]
) -> Iterator[AgreedState]:
    """Yield the states of the parameters that have any on some rank."""
    found: dict[tuple[Any, ...], AgreedState | None] = {}
    for part in parts:
        kinds = [report[part.fqn] for report in reports]
        key = (*map(id, kinds), *part.owners)
        if key not in found:
            found[key] = _merge(part, kinds) if any(kinds) else None
        state = found[key]
        if state is not None:
            yield replace(state, part=part)


def _merge(part: ParamPart, kinds: Sequence[_Kind]) -> AgreedState:
    """Return the state of one parameter, of which the ranks have ``kinds``."""
    result = AgreedState(part)
    owners = part.owners
    for name in dict.fromkeys(name for kind in kinds for name in kind):
        have = [rank for rank in owners if name in kinds[rank]]
        have = have or [rank for rank, kind in enumerate(kinds) if name in kind]
        values = {r: kinds[r][name] for r in have if kinds[r][name] is not None}
        sharded = [rank for rank, each in values.items() if isinstance(each, Sharded)]
        if not sharded:
            # The state of a flat parameter is that of all in it, on every rank.
            seen = [kind[name] for kind in kinds if name in kind]
            seen = seen if part.is_flat else list(values.values())
            first = next((each for each in seen if each is not None), None)
            result.plain[name] = first
            if values and not all(same_value(each, first) for each in seen):
                if name == "step":
                    raise ValueError(_other_steps(part, kinds))
                result.per_rank[name] = PerRank(tuple(kind.get(name) for kind in kinds))
            continue
        what = f"optimizer state {name!r} of parameter {part.fqn!r}"
        if len(sharded) < len(values):
            other = next(rank for rank in values if rank not in sharded)
            raise ValueError(
                f"{what} has one value per element on rank {sharded[0]}, and not on "
                f"rank {other}: {describe(unpacked_value(values[other]))}. Save it "
                "with StateDictType.LOCAL_STATE_DICT, which keeps each rank's own"
            )
        dtypes = {each.dtype for each in values.values()}
        if len(dtypes) > 1:
            raise ValueError(
                f"{what} has the dtypes {sorted(map(str, dtypes))} on different ranks: "
                "give all ranks the same"
            )
        lacking = [rank for rank in owners if rank not in values]
        if lacking:
            raise RuntimeError(
                _missing(
                    f"the optimizer of rank {lacking[0]} has no {name!r} for its "
                    f"part of {part.fqn!r}"
                )
            )
        result.sharded[name] = dtypes.pop()
        classes = [each.name for each in values.values() if each.name is not None]
        if classes:
            result.classes[name] = classes[0]
    return result


def _other_steps(part: ParamPart, kinds: Sequence[_Kind]) -> str:
    steps = {rank: kind["step"] for rank, kind in enumerate(kinds) if "step" in kind}
    first, *others = steps
    other = next(r for r in others if not same_value(steps[r], steps[first]))
    return (
        f"optimizer state 'step' of parameter {part.fqn!r} differs between the ranks "
        f"that hold the parameter: {describe(unpacked_value(steps[first]))} on rank "
        f"{first}, {describe(unpacked_value(steps[other]))} on rank {other}: step all "
        "ranks together, or save it with StateDictType.LOCAL_STATE_DICT, which keeps "
        "each rank's own"
    )
