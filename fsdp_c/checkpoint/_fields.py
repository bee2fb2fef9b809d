"""Reads members of parsed JSON objects; a wrong one is an error that names it."""

from collections.abc import Callable
from typing import Any, TypeVar

MAX_NUMEL = 1 << 56

_T = TypeVar("_T")


class Fields:
    """The members of one JSON object, each read once.

    Args:
        value: What should be a JSON object.
        where: Its name, for messages.

    Raises:
        ValueError: It is none; and from every method, if the member is missing or
            of another type.
    """

    def __init__(self, value: Any, where: str) -> None:
        self._members = dict(json_object(value, where))
        self._where = where

    def __contains__(self, key: str) -> bool:
        return key in self._members

    def any(self, key: str) -> Any:
        """Take the member ``key``, whatever it is."""
        if key not in self._members:
            raise ValueError(f"{self._where} has no {key!r}")
        return self._members.pop(key)

    def integer(self, key: str, low: int = 0, high: int = MAX_NUMEL) -> int:
        """Take an int in ``[low, high]``."""
        return integer(self.any(key), f"{self._where}.{key}", low, high)

    def string(self, key: str) -> str:
        """Take a str."""
        return string(self.any(key), f"{self._where}.{key}")

    def boolean(self, key: str) -> bool:
        """Take a bool."""
        value = self.any(key)
        if not isinstance(value, bool):
            raise ValueError(
                f"{self._where}.{key} is {_show(value)}, not true or false"
            )
        return value

    def items(self, key: str, item: Callable[[Any, str], _T]) -> list[_T]:
        """Take a list, each element read by ``item(element, where)``."""
        value = self.any(key)
        where = f"{self._where}.{key}"
        if not isinstance(value, list):
            raise ValueError(f"{where} is {_show(value)}, not a list")
        return [item(element, f"{where}[{i}]") for i, element in enumerate(value)]

    def members(self, key: str, item: Callable[[Any, str], _T]) -> dict[str, _T]:
        """Take an object, each member read by ``item(member, where)``."""
        value = self.any(key)
        where = f"{self._where}.{key}"
        return {
            name: item(each, f"{where}[{name!r:.200}]")
            for name, each in json_object(value, where).items()
        }

    def end(self) -> None:
        """Check that no member is left."""
        if self._members:
            raise ValueError(
                f"{self._where} has an unknown {next(iter(self._members))!r:.80}"
            )


def integer(value: Any, where: str, low: int = 0, high: int = MAX_NUMEL) -> int:
    """Return ``value`` if it is an int in ``[low, high]``."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(
            f"{where} is {_show(value)}, not an integer in [{low}, {high}]"
        )
    return value


def string(value: Any, where: str) -> str:
    """Return ``value`` if it is a str."""
    if not isinstance(value, str):
        raise ValueError(f"{where} is {_show(value)}, not a string")
    return value


def json_object(value: Any, where: str) -> dict[str, Any]:
    """Return ``value`` if it is an object."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_show(value)}, not an object")
    return value


def anything(value: Any, where: str) -> Any:
    """Return ``value``, which another reader checks."""
    return value


def _show(value: Any) -> str:
    if isinstance(value, (str, bool, float)):
        return f"{value!r:.60}"
    if isinstance(value, int) and abs(value) < 1 << 64:
        return str(value)
    return "null" if value is None else f"a {type(value).__name__}"
