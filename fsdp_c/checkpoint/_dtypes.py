"""Dtypes by the names that safetensors gives them."""

import torch

_BY_NAME = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in _BY_NAME.items()
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """Return the name of ``dtype``.

    Raises:
        ValueError: safetensors has no such dtype; the message names ``what``.
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise ValueError(
            f"{what} is {dtype}, which safetensors files cannot hold: convert it to "
            f"one of {', '.join(str(known) for known in _NAMES)}"
        )
    return name


def dtype_named(name: object) -> torch.dtype:
    """Return the dtype called ``name``.

    Raises:
        ValueError: There is none.
    """
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"there is no dtype {name!r:.80}")
    return dtype
