"""Dtypes by the names that safetensors gives them."""

import torch

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
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
