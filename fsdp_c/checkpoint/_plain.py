"""Plain values as JSON: what schedulers, optimizers and ``extra`` hold.

None, bool, int, float, str, list and dict with str keys are themselves in JSON.
What JSON lacks is an object with one member that begins with ``$``:

    {"$float": "inf"}            nan, inf, -inf
    {"$tuple": [...]}
    {"$set": [...]}              ordered by their repr(), so that files are equal
    {"$dict": [[key, value]]}    other keys than str, or keys that begin with "$"
    {"$bytes": "hex"}
    {"$scalar": ["F32", 3.0]}    a 0-dim tensor, exact
    {"$tensor": "plain/0"}       a tensor, by its key in the safetensors file

Other values are refused. Nothing is pickled.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fsdp_c.checkpoint._dtypes import dtype_name, dtype_named

_SCALARS = {
    torch.bool: bool,
    torch.uint8: int,
    torch.int8: int,
    torch.int16: int,
    torch.int32: int,
    torch.int64: int,
    torch.float16: float,
    torch.bfloat16: float,
    torch.float32: float,
    torch.float64: float,
}
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
MAX_DEPTH = 200


def encode(
    value: Any, where: str, put_tensor: Callable[[Tensor], str], depth: int = 0
) -> Any:
    """Return ``value`` as a JSON value.

    ``where`` is its name in messages. ``put_tensor`` stores a tensor that is not 0-dim,
    and returns its key.

    Raises:
        TypeError: Something in it is not plain; the message says where.
        ValueError: It is nested deeper than 200 levels, or contains itself.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"{where:.80}... is nested too deep, or contains itself")
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return {"$float": "nan" if math.isnan(value) else repr(float(value))}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, put_tensor)
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, (list, tuple)):
        items = [
            encode(item, f"{where}[{index}]", put_tensor, depth + 1)
            for index, item in enumerate(value)
        ]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, set):
        where = f"a member of {where}"
        members = sorted(value, key=repr)
        return {
            "$set": [encode(each, where, put_tensor, depth + 1) for each in members]
        }
    if isinstance(value, dict):
        pairs = [
            (key, encode(item, f"{where}[{key!r}]", put_tensor, depth + 1))
            for key, item in value.items()
        ]
        if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        where = f"a key of {where}"
        return {
            "$dict": [[encode(k, where, put_tensor, depth + 1), v] for k, v in pairs]
        }
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold (it "
        "takes None, bool, int, float, str, bytes, list, tuple, set, dict and "
        "tensors): convert it, or leave it out"
    )


def _encode_tensor(
    value: Tensor, where: str, put_tensor: Callable[[Tensor], str]
) -> dict[str, Any]:
    dtype = dtype_name(value.dtype, where)
    if value.dim() > 0 or value.dtype not in _SCALARS:
        return {"$tensor": put_tensor(value)}
    return {"$scalar": [dtype, encode(value.item(), where, put_tensor)]}


def without_constants(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options but for classes, functions, dtypes and members of an Enum.

    A program makes its optimizer with these anew, and they do not change in training.
    """
    return {
        name: value
        for name, value in options.items()
        if not isinstance(value, (type, Enum, torch.dtype))
        and not inspect.isroutine(value)
    }


def encode_name(name: Any, where: str) -> str:
    """Return the name of a state as a string; integers begin with ``$``.

    Raises:
        TypeError: It is something else.
    """
    if type(name) is int:
        return f"${name}"
    if not isinstance(name, str) or name.startswith("$"):
        raise TypeError(
            f"{where} has the name {name!r}, which a checkpoint cannot hold: it takes "
            "int, and str without $ at the beginning"
        )
    return name


def decode_name(name: str) -> Any:
    """Undo :func:`encode_name`."""
    return int(name[1:]) if name.startswith("$") else name


def decode(value: Any, get_tensor: Callable[[str], Tensor]) -> Any:
    """Return what :func:`encode` was given; tensors are on the CPU.

    Raises:
        ValueError: encode() did not make ``value``.
    """
    try:
        return _decode(value, get_tensor)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _decode(value: Any, get_tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, get_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(item, get_tensor) for key, item in value.items()}
    content = value[tag]
    if len(value) == 1:
        if tag == "$float" and isinstance(content, str) and content in _SPECIAL:
            return _SPECIAL[content]
        if tag == "$tuple" and isinstance(content, list):
            return tuple(_decode(item, get_tensor) for item in content)
        if tag == "$set" and isinstance(content, list):
            return _decode_set(content, get_tensor)
        if tag == "$bytes" and isinstance(content, str):
            return _decode_bytes(content)
        if tag == "$tensor" and isinstance(content, str):
            return get_tensor(content)
        if tag == "$dict" and isinstance(content, list):
            return _decode_dict(content, get_tensor)
        if tag == "$scalar" and isinstance(content, list) and len(content) == 2:
            return _decode_scalar(content[0], _decode(content[1], get_tensor))
    raise ValueError(f"{value!r:.80} is not a value that a checkpoint can hold")


def _decode_bytes(content: str) -> bytes:
    try:
        return bytes.fromhex(content)
    except ValueError:
        raise ValueError(f"{content!r:.80} is not hexadecimal") from None


def _decode_set(content: list[Any], get_tensor: Callable[[str], Tensor]) -> Any:
    try:
        members = {_decode(each, get_tensor) for each in content}
    except TypeError as error:
        raise ValueError(f"a member of {content!r:.80}: {error}") from None
    if len(members) != len(content):
        raise ValueError(f"a member of {content!r:.80} appears twice")
    return members


def _decode_dict(content: list[Any], get_tensor: Callable[[str], Tensor]) -> Any:
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in content):
        raise ValueError(f"{content!r:.80} is not a list of keys and values")
    pairs = [(_decode(k, get_tensor), _decode(v, get_tensor)) for k, v in content]
    try:
        members = dict(pairs)
    except TypeError as error:
        raise ValueError(f"a key of {content!r:.80}: {error}") from None
    if len(members) != len(pairs):
        raise ValueError(f"a key of {content!r:.80} appears twice")
    return members


def _decode_scalar(name: Any, number: Any) -> Tensor:
    dtype = dtype_named(name)
    if dtype not in _SCALARS or type(number) is not _SCALARS[dtype]:
        raise ValueError(f"{number!r:.80} is not a scalar of dtype {name}")
    try:
        scalar = torch.tensor(number, dtype=dtype, device="cpu")
    except (RuntimeError, OverflowError) as error:
        raise ValueError(
            f"{number!r:.80} is not a value of dtype {name}: {error}"
        ) from None
    if scalar.item() != number and number == number:  # noqa: PLR0124  # NaN is not
        raise ValueError(f"{number!r:.80} is not a value of dtype {name}")
    return scalar


def tensor_keys(value: Any) -> list[str]:
    """Return the keys of all tensors in an encoded value, in order."""
    if isinstance(value, list):
        return [key for item in value for key in tensor_keys(item)]
    if isinstance(value, dict):
        if set(value) == {"$tensor"} and isinstance(value["$tensor"], str):
            return [value["$tensor"]]
        return [key for item in value.values() for key in tensor_keys(item)]
    return []
