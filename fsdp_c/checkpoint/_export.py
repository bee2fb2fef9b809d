"""export: a checkpoint's model as one set of safetensors files, as Hugging Face's."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_c._units.collectives import in_batches
from fsdp_c.checkpoint._dtypes import dtype_name, dtype_named
from fsdp_c.checkpoint._errors import CheckpointError
from fsdp_c.checkpoint._files import (
    Advance,
    new_file,
    sync_folder,
    write_all,
    write_document,
)
from fsdp_c.checkpoint._manifest import TensorSpec
from fsdp_c.checkpoint._memory import bytes_of
from fsdp_c.checkpoint._plan import Part, find_parts
from fsdp_c.checkpoint._progress import progress as progress_bar
from fsdp_c.checkpoint._safetensors import make_header
from fsdp_c.checkpoint._source import Source

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ALIASES = "fsdp_c.aliases"
"""In a file's metadata: other names of shared tensors, as JSON."""

_OURS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|" + re.escape(INDEX))
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*((?:[KMGT]I?)?)B\s*")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 1 << 10 * power for power, unit in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the set, and where its bytes are."""

    spec: TensorSpec
    dtype: torch.dtype
    parts: Sequence[Part]

    @property
    def nbytes(self) -> int:
        return self.spec.numel * self.dtype.itemsize


def parse_size(size: int | str) -> int:
    """Return a number of bytes, given as such or as ``"5GB"``, ``"200MiB"``.

    Raises:
        ValueError: It is neither, or not positive.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.fullmatch(size.upper()) if isinstance(size, str) else None
    if match is None or float(match[1]) * _UNITS[match[2]] < 1:
        raise ValueError(
            f"max_shard_size must be bytes, or text such as '5GB' or '200MiB', got "
            f"{size!r}"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def export(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> list[str]:
    """Write the model of a checkpoint as ``model*.safetensors`` in ``target``.

    Names, shapes and dtypes are those of the unwrapped model's state dict; of a
    shared tensor only the first name is written, as Hugging Face does. With more
    than one file there is a ``model.safetensors.index.json``. One process does it,
    without a model and without communication, in 64 MiB of memory. Checksums are
    checked first.

    Args:
        path: The checkpoint.
        target: A folder; it may hold other files.
        max_shard_size: Bytes of a file's tensors; a larger tensor is alone in its.
        dtype: Convert floating tensors to it.
        overwrite: Replace such a set that is in ``target``.
        progress: Show bars; None: if stderr is a terminal.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: The checkpoint is damaged. Nothing was written.
        FileExistsError: There is such a set, and ``overwrite`` is False.
        ValueError: ``max_shard_size`` is not a size.
    """
    limit = parse_size(max_shard_size)
    folder = os.fspath(target)
    old = [name for name in _names_in(folder) if _OURS.fullmatch(name)]
    if old and not overwrite:
        raise FileExistsError(
            f"there is {old[0]} in {folder}: pass overwrite=True, or another folder"
        )
    with Source(path) as source:
        tensors = _find_tensors(source, dtype)
        with progress_bar("checking", source.nbytes, progress) as advance:
            problems = source.check(advance)
        if problems:
            raise CheckpointError(f"nothing was exported from {source.path}", problems)
        sized = ((tensor, None, tensor.nbytes) for tensor in tensors)
        files = list(in_batches(sized, limit)) or [[]]
        os.makedirs(folder, exist_ok=True)
        total = sum(tensor.nbytes for tensor in tensors)
        with progress_bar("exporting", total, progress) as advance:
            names = _write_set(folder, files, total, source.manifest.save_id, advance)
    for name in set(old) - set(names):
        os.unlink(os.path.join(folder, name))
    sync_folder(folder)
    return names


def _names_in(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _find_tensors(source: Source, dtype: torch.dtype | None) -> list[_Tensor]:
    tensors = []
    for spec in source.manifest.tensors():
        what = repr(spec.name)
        parts = find_parts(source, what, spec, (0, spec.numel))
        for part in parts:
            part.rank.want(*part.bytes, what)
        saved = dtype_named(spec.dtype)
        wanted = dtype if dtype and saved.is_floating_point else saved
        tensors.append(_Tensor(spec, wanted, parts))
    return tensors


def _write_set(
    folder: str,
    files: Sequence[Sequence[_Tensor]],
    total_nbytes: int,
    save_id: str,
    advance: Advance,
) -> list[str]:
    """Write all files under temporary names, then rename them, the index last."""
    if len(files) == 1:
        names = [SINGLE]
    else:
        names = [
            f"model-{number:05d}-of-{len(files):05d}.safetensors"
            for number in range(1, len(files) + 1)
        ]
    temporary = {name: Path(folder, f".{name}.{save_id}") for name in (*names, INDEX)}
    try:
        for path in temporary.values():
            path.unlink(missing_ok=True)  # of an export that was killed
        for name, tensors in zip(names, files, strict=True):
            _write_file(temporary[name], tensors, advance)
        if len(files) > 1:
            weight_map = {
                tensor.spec.name: name
                for name, tensors in zip(names, files, strict=True)
                for tensor in tensors
            }
            index = {"metadata": {"total_size": total_nbytes}, "weight_map": weight_map}
            names.append(INDEX)
            data = json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"
            write_document(temporary[INDEX], data)
        for name in names:
            os.rename(temporary[name], os.path.join(folder, name))
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return names


def _write_file(path: Path, tensors: Sequence[_Tensor], advance: Advance) -> None:
    metadata = {"format": "pt"}
    aliases = {
        alias: tensor.spec.name for tensor in tensors for alias in tensor.spec.aliases
    }
    if aliases:
        metadata[ALIASES] = json.dumps(aliases)
    header, _ = make_header(
        (
            (each.spec.name, dtype_name(each.dtype, each.spec.name), each.spec.shape)
            for each in tensors
        ),
        metadata,
    )
    with new_file(path) as descriptor:
        write_all(descriptor, _chunks(header, tensors), lambda _: None, advance)


def _chunks(header: bytes, tensors: Sequence[_Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in tensors:
        for part in tensor.parts:
            saved = dtype_named(part.piece.dtype)
            for chunk in part.chunks():
                if saved == tensor.dtype:
                    yield chunk
                else:
                    values = torch.frombuffer(chunk, dtype=saved)
                    yield bytes_of(values.to(tensor.dtype))
