"""What the optimizer states of all ranks hold together, agreed on by all.

With use_orig_params=True a rank that holds nothing of a parameter has no state for
it, not even its step counter. Hence the ranks tell each other, once a call, which
states they have, and take what is not sharded from a rank that has it.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_c._state.optim.states import ParamState, describe, same_value
from fsdp_c._state.parts import ParamPart
from fsdp_c._units.failures import naming_ranks


class Scalar(NamedTuple):
    """A 0-dim tensor, in a form that is quick to pickle."""

    dtype: torch.dtype
    value: Any

    def tensor(self) -> Tensor:
        """Return it on the CPU."""
        return torch.tensor(self.value, dtype=self.dtype, device="cpu")


class PerRank(NamedTuple):
    """A plain state that is another one on each rank.

    Attributes:
        values: By rank of the sharding group, as of :func:`packed_value`; None where
            the rank has none.
    """

    values: tuple[Any, ...]

    @property
    def first(self) -> Any:
        """The one of the first rank that has one."""
        return next((value for value in self.values if value is not None), None)

    def of(self, part: ParamPart, key: str) -> Any:
        """Return this rank's own; the first one, of another number of ranks."""
        group = part.shard_group
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        if len(self.values) == size:
            own = self.values[rank]
            return self.first if own is None else own
        warnings.warn(
            f"optimizer state {key!r} of parameter {part.fqn!r} was another on each "
            f"of {len(self.values)} ranks, and is loaded on {size}: all get the first "
            "rank's",
            stacklevel=6,
        )
        return self.first


def packed_value(value: Any) -> Any:
    """Return a plain state as it is passed to other ranks."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0 and not value.dtype.is_complex:
        return Scalar(value.dtype, value.item())
    return value.detach().cpu()


def unpacked_value(value: Any) -> Any:
    """Return a plain state as the optimizer has it, with memory of its own."""
    return value.tensor() if isinstance(value, Scalar) else copy.deepcopy(value)


@dataclass
class AgreedState:
    """The state of one parameter, of all ranks together.

    Attributes:
        part: The parameter.
        sharded: dtypes of the states that have one value per element.
        plain: The other states, as :func:`packed_value`; shared by parameters.
        per_rank: Those of them that differ between ranks.
    """

    part: ParamPart
    sharded: dict[str, torch.dtype] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, PerRank] = field(default_factory=dict)


# What one rank has of a parameter: whether it is sharded, and a dtype or a plain state.
_Kind = dict[str, tuple[bool, Any]]


class _Report(NamedTuple):
    """One rank's states.

    Most parameters have the same: ``kinds`` lists what differs, ``states`` has the
    index of each parameter's.
    """

    error: str | None
    kinds: list[_Kind]
    states: dict[str, int]


def agree(
    states: Mapping[str, ParamState],
    groups: Iterable[ProcessGroup],
    error: Exception | None,
) -> dict[str, AgreedState]:
    """Return the states that the ranks have together; those with none are left out.

    All ranks of ``groups`` must call it. Parameters whose sharding group is not in
    ``groups`` are left out, unless each rank has the whole.

    Args:
        states: This rank's.
        groups: The sharding groups, in the same order on all ranks.
        error: What went wrong on this rank before, if anything.

    Raises:
        RuntimeError: It went wrong on another rank; or the ranks' optimizers step
            different parameters, or lack state for what they hold.
        ValueError: State is sharded on some ranks only.
    """
    gathered: list[tuple[_Report, list[Any]]] = []
    for group in groups:
        its_states = {
            name: state
            for name, state in states.items()
            if state.part.shard_group is group
        }
        mine = _report(its_states, error)
        reports: list[Any] = [None] * group.size()
        with naming_ranks(group, "comparison of optimizer states"):
            dist.all_gather_object(reports, mine, group=group)
        gathered.append((mine, reports))
    if error is not None:
        raise error
    agreed: dict[str, AgreedState] = {}
    for mine, reports in gathered:
        _check_reports(reports)
        parts = [states[name].part for name in mine.states]
        agreed.update((each.part.fqn, each) for each in _agreed_states(parts, reports))
    for name, state in states.items():
        if state.part.shard_group is None and state.has_state:
            agreed[name] = AgreedState(
                state.part,
                {key: value.dtype for key, value in state.sharded.items()},
                {key: packed_value(value) for key, value in state.plain.items()},
            )
    return {name: agreed[name] for name in states if name in agreed}


def _report(states: Mapping[str, ParamState], error: Exception | None) -> _Report:
    report = _Report(None if error is None else str(error), [], {})
    known: dict[tuple[Any, ...], int] = {}
    for name, state in states.items():
        kind = _kind(state)
        key = _key(kind)
        new = len(report.kinds)
        index = new if key is None else known.setdefault(key, new)
        if index == new:
            report.kinds.append(kind)
        report.states[name] = index
    return report


def _kind(state: ParamState) -> _Kind:
    if not state.has_state:
        return {}
    return {
        **{name: (True, value.dtype) for name, value in state.sharded.items()},
        **{name: (False, packed_value(value)) for name, value in state.plain.items()},
    }


def _key(kind: _Kind) -> tuple[Any, ...] | None:
    """Return what two kinds have in common only if they are the same, bit for bit.

    None where that takes more than a look.
    """
    key: list[Any] = []
    for name, (is_sharded, value) in kind.items():
        if isinstance(value, Scalar):
            key += name, value.dtype, repr(value.value)
        elif is_sharded:
            key += name, value
        else:
            return None
    return tuple(key)


def _check_reports(reports: Sequence[_Report]) -> None:
    for rank, report in enumerate(reports):
        if report.error is not None:
            raise RuntimeError(f"rank {rank} of the sharding group: {report.error}")
    stepped = {name for report in reports for name in report.states}
    for rank, report in enumerate(reports):
        lacking = sorted(stepped - report.states.keys())
        if lacking:
            raise RuntimeError(
                _missing(f"the optimizer of rank {rank} does not step {lacking[0]!r}")
            )


def _missing(what: str) -> str:
    return (
        "FSDP currently requires each rank to have at least the optimizer states "
        "needed by rank 0's optimizer but some ranks are missing some of those "
        f"states: {what}, which other ranks' do; give the optimizers of all ranks "
        "the same parameters and step them together"
    )


def _agreed_states(
    parts: Sequence[ParamPart], reports: Sequence[_Report]
) -> Iterator[AgreedState]:
    """Yield the states of the parameters that have any on some rank."""
    found: dict[tuple[Any, ...], AgreedState | None] = {}
    for part in parts:
        indices = tuple(report.states[part.fqn] for report in reports)
        owners = part.owners
        key = (indices, *owners)
        if key not in found:
            kinds = [
                report.kinds[index]
                for report, index in zip(reports, indices, strict=True)
            ]
            found[key] = _merge(part, owners, kinds)
        state = found[key]
        if state is not None:
            yield AgreedState(part, state.sharded, state.plain, state.per_rank)


def _merge(
    part: ParamPart, owners: Sequence[int], reports: Sequence[_Kind]
) -> AgreedState | None:
    """Return the state of one parameter, of which the ranks have ``reports``.

    Args:
        part: The parameter.
        owners: The ranks that hold a part of it.
        reports: Of all ranks.
    """
    if not any(reports):
        return None
    result = AgreedState(part)
    for name in dict.fromkeys(name for report in reports for name in report):
        have = [rank for rank in owners if name in reports[rank]]
        have = have or [rank for rank, report in enumerate(reports) if name in report]
        have = [rank for rank in have if reports[rank][name] != (False, None)]
        values = [reports[rank][name] for rank in have]
        if not values:
            result.plain[name] = None
            continue
        if all(is_sharded for is_sharded, _ in values):
            dtypes = {dtype for _, dtype in values}
            if len(dtypes) > 1:
                raise ValueError(
                    f"optimizer state {name!r} of parameter {part.fqn!r} has the "
                    f"dtypes {sorted(map(str, dtypes))} on different ranks: give all "
                    "ranks the same"
                )
            lacking = [rank for rank in owners if rank not in have]
            if lacking:
                raise RuntimeError(
                    _missing(
                        f"the optimizer of rank {lacking[0]} has no {name!r} for its "
                        f"part of {part.fqn!r}"
                    )
                )
            result.sharded[name] = dtypes.pop()
            continue
        _check_kind(part, name, have, values)
        first = values[0][1]
        result.plain[name] = first
        # The state of a flat parameter is that of all in it, on every rank.
        seen = [report[name] for report in reports if name in report]
        seen = seen if part.is_flat else values
        if not all(same_value(value, first) for _, value in seen):
            if name == "step":
                raise ValueError(_other_steps(part, reports))
            result.per_rank[name] = PerRank(
                tuple(report.get(name, (False, None))[1] for report in reports)
            )
    return result


def _other_steps(part: ParamPart, reports: Sequence[_Kind]) -> str:
    """Say that ranks were not stepped together."""
    steps = {
        rank: report["step"][1]
        for rank, report in enumerate(reports)
        if "step" in report
    }
    first, *others = steps
    other = next(r for r in others if not same_value(steps[r], steps[first]))
    return (
        f"optimizer state 'step' of parameter {part.fqn!r} differs between the ranks "
        f"that hold the parameter: {describe(unpacked_value(steps[first]))} on rank "
        f"{first}, {describe(unpacked_value(steps[other]))} on rank {other}: step all "
        "ranks together, or save it with StateDictType.LOCAL_STATE_DICT, which keeps "
        "each rank's own"
    )


def _check_kind(
    part: ParamPart, name: str, ranks: Sequence[int], values: Sequence[tuple[bool, Any]]
) -> None:
    """Refuse a state that has one value per element on some of the ranks only."""
    sharded = [rank for rank, value in zip(ranks, values, strict=True) if value[0]]
    if not sharded:
        return
    other = next(rank for rank in ranks if rank not in sharded)
    value = dict(zip(ranks, values, strict=True))[other][1]
    raise ValueError(
        f"optimizer state {name!r} of parameter {part.fqn!r} has one value per "
        f"element on rank {sharded[0]}, and not on rank {other}: "
        f"{describe(unpacked_value(value))}. Save it with "
        "StateDictType.LOCAL_STATE_DICT, which keeps each rank's own"
    )
