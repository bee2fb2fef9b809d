"""What an optimizer has beside the state of parameters, kept right over rounds.

Some optimizers count steps in their parameter groups, in attributes of their own or in
state that belongs to no parameter, and some begin to do so in the first step. A step of
several rounds counts once.
"""

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

# State stays, and parameters are the caller's.
_LEFT_OUT = ("state", "param_groups", "defaults", "params", "param_names")

# A parameter group, attributes, or state by name.
_Table = dict[Any, Any]


class BetweenRounds:
    """Plain values of an optimizer, from before a step.

    Those are numbers, tensors of one element, and tuples and dictionaries by name of
    these. A list may have an entry for each parameter, and stays as rounds leave it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._tables = list(_tables(optimizer))
        self._before = [_plain_values(table) for table in self._tables]
        self._copies = [_copied(values) for values in self._before]
        self._after: dict[int, _Table] = {}  # by position in the groups
        self._states = [each.state for each in nested(optimizer)]
        self._known = [set(state) for state in self._states]
        self._begun: list[dict[Any, Any]] = [{} for _ in self._states]
        self._has_begun = False

    def begin_round(self) -> None:
        """Undo what the round before did to the values."""
        if not self._has_begun:
            self._has_begun = True
            return
        for table, before, copies in zip(
            self._tables, self._before, self._copies, strict=True
        ):
            for name in _plain_values(table).keys() - before.keys():
                del table[name]
            _write(table, before, copies)

    def end_round(self, stepped: Collection[nn.Parameter]) -> None:
        """Remember the values of groups that had parameters in this round.

        State that has begun in this round is out of sight in the next ones: an
        optimizer may take its count of steps from there, as heavyball does.
        """
        for state, known, begun in zip(
            self._states, self._known, self._begun, strict=True
        ):
            for param in stepped:
                if param not in known and param in state:
                    begun[param] = state.pop(param)
        ids = set(map(id, stepped))
        for position, group in enumerate(self._groups):
            if any(id(param) in ids for param in group["params"]):
                self._after[position] = _copied(_plain_values(group))

    def end(self) -> None:
        """Give each group the values of the last round that had parameters of it."""
        for position, values in self._after.items():
            group = self._groups[position]
            _write(group, _plain_values(group), values)
        for state, begun in zip(self._states, self._begun, strict=True):
            state.update(begun)


def nested(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and those that it wraps."""
    found = [optimizer]
    for each in found:
        inside = [v for v in vars(each).values() if isinstance(v, Optimizer)]
        found += [one for one in inside if not any(one is known for known in found)]
    return found


def _tables(optimizer: Optimizer) -> Iterator[_Table]:
    for each in nested(optimizer):
        yield from each.param_groups
        yield each.state
        yield vars(each)


def _write(table: _Table, present: _Table, values: _Table) -> None:
    """Write values, tensors into those that are there, which others may share."""
    for name, value in _copied(values).items():
        tensor = present.get(name)
        if isinstance(tensor, Tensor):
            tensor.copy_(value)
        table[name] = tensor if isinstance(tensor, Tensor) else value


def _plain_values(table: _Table) -> _Table:
    return {
        name: value
        for name, value in table.items()
        if isinstance(name, str) and name not in _LEFT_OUT and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not isinstance(value, nn.Parameter)
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return len(_plain_values(value)) == len(value)
    return value is None or isinstance(value, (bool, int, float, complex, str))


def _copied(values: _Table) -> _Table:
    return {name: _copy(value) for name, value in values.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return _copied(value) if isinstance(value, dict) else value
