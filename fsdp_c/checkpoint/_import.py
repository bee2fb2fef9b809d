"""import_safetensors: a set of safetensors files into a wrapped model."""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from fsdp_c.checkpoint import _documents
from fsdp_c.checkpoint._contents import find_contents
from fsdp_c.checkpoint._dtypes import dtype_named
from fsdp_c.checkpoint._errors import CheckpointError, mismatches, reason
from fsdp_c.checkpoint._export import ALIASES, INDEX, SINGLE
from fsdp_c.checkpoint._fields import Fields, string
from fsdp_c.checkpoint._files import Advance, Folder
from fsdp_c.checkpoint._model_targets import ModelTargets
from fsdp_c.checkpoint._plan import Target
from fsdp_c.checkpoint._progress import progress as progress_bar
from fsdp_c.checkpoint._ranks import Ranks
from fsdp_c.checkpoint._reads import FileReads, Read
from fsdp_c.checkpoint._safetensors import FileTensor

_HEADLINE = "nothing was imported; the model is as it was"
_BROKEN = "the files were imported in part only: import or load again"


@dataclass(frozen=True)
class Imported:
    """Names that only one side had, with ``strict=False``.

    Attributes:
        missing: Names that the model has and the files have not.
        unexpected: Names that only the files have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def import_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    cast: bool = False,
    process_group: ProcessGroup | None = None,
    progress: bool | None = None,
) -> Imported:
    """Load parameters and buffers from a set of safetensors files.

    All ranks must call it, between steps. Each reads the headers, and of the tensors
    only what it holds, straight into its shards. Such files have no checksums: only
    headers and sizes are checked.

    Args:
        path: A ``.safetensors`` file, or a folder with ``model.safetensors`` or with
            ``model.safetensors.index.json`` and the files that it names.
        model: The wrapped model. Names are those of the unwrapped one.
        strict: False: names that only one side has are no error.
        cast: Convert to the model's dtypes; False: another dtype is an error.
        process_group: The ranks that hold the model; the default group if None.
        progress: Show a bar on rank 0; None: if stderr is a terminal.

    Raises:
        CheckpointError: On all ranks, with everything that is missing, unexpected, of
            a wrong shape or dtype, or damaged; the model is as it was.
    """
    ranks = Ranks(process_group)
    with ExitStack() as stack:
        with ranks.together(f"{_HEADLINE} ({os.fspath(path)})") as problems:
            importing = _Importing(os.fspath(path), model)
            stack.callback(importing.folder.close)
            problems.extend(importing.plan(strict=strict, cast=cast))
        is_on = progress if ranks.rank == 0 else False
        with progress_bar("importing", importing.nbytes, is_on) as advance:
            with ranks.together(_BROKEN):
                importing.run(advance)
            with ranks.together(_BROKEN):
                importing.finish()  # may communicate
        return Imported(tuple(importing.missing), tuple(importing.unexpected))


class _Importing:
    """One import on one rank: plan, then run."""

    def __init__(self, path: str, model: nn.Module) -> None:
        self._targets = ModelTargets(find_contents(model))
        is_file = path.endswith(".safetensors") and not os.path.isdir(path)
        # Hugging Face's own cache consists of links.
        self.folder = Folder(os.path.dirname(path) or "." if is_file else path, True)
        self._single = os.path.basename(path) if is_file else None
        self._files: dict[str, FileReads] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are planned to be read."""
        return sum(file.nbytes for file in self._files.values())

    def plan(self, *, strict: bool, cast: bool) -> list[str]:
        """Read all headers and plan the reads; return all problems."""
        problems: list[str] = []
        places = self._find_tensors(problems)
        names = {name: name for name in places}
        for file in self._files.values():
            for alias, name in _aliases(file, problems).items():
                if name in places:
                    names.setdefault(alias, name)
        used = set()
        for target in self._targets.targets:
            found = list(dict.fromkeys(names[n] for n in target.names if n in names))
            used.update(found)
            if not found:
                self.missing.append(target.names[0])
                continue
            file, info = places[found[0]]
            _plan_read(target, file, info, cast, problems)
        self.unexpected = [name for name in places if name not in used]
        if strict:
            problems += mismatches(self.missing, self.unexpected, "the files")
        return problems

    def _find_tensors(
        self, problems: list[str]
    ) -> dict[str, tuple[FileReads, FileTensor]]:
        """Return all tensors by name, and where they are."""
        names, listed = self._find_files()
        places: dict[str, tuple[FileReads, FileTensor]] = {}
        for name in names:
            file = self._files[name] = FileReads(self.folder, name)
            try:
                with self.folder.open(name) as descriptor:
                    tensors = file.read_header(descriptor)
            except (OSError, ValueError) as error:
                problems.append(f"{name} cannot be read: {reason(error)}")
                continue
            for tensor, info in tensors.items():
                if tensor in places:
                    problems.append(f"{tensor!r} is in two files")
                places[tensor] = file, info
        for tensor, name in listed.items():
            file = self._files[name]
            if file.tensors and tensor not in file.tensors:
                problems.append(f"{name} has no {tensor!r}, which {INDEX} lists")
        return places

    def _find_files(self) -> tuple[list[str], dict[str, str]]:
        """Return the files' names, and of each tensor its file's if an index has it."""
        if self._single is not None:
            return [self._single], {}
        names = self.folder.names()
        if INDEX in names:
            try:
                data = self.folder.read(INDEX, _documents.MAX_NBYTES)
                fields = Fields(_documents.parse_json(data), INDEX)
                weight_map = fields.members("weight_map", string)
            except ValueError as error:
                raise CheckpointError(f"{INDEX}: {error}") from None
            for name in weight_map.values():
                if os.path.basename(name) != name or not name.endswith(".safetensors"):
                    raise CheckpointError(
                        f"{INDEX} names {name!r:.200}, which is not a safetensors file "
                        "in this folder"
                    )
            return list(dict.fromkeys(weight_map.values())), weight_map
        if SINGLE in names:
            return [SINGLE], {}
        raise CheckpointError(
            f"{self.folder.path} has neither {SINGLE} nor {INDEX}: pass a folder that "
            "fsdp_c.checkpoint.export or save_pretrained wrote, or a file"
        )

    def run(self, advance: Advance) -> None:
        """Read everything."""
        for file in self._files.values():
            file.run(advance)

    def finish(self) -> None:
        """Put into place what was read beside its place."""
        self._targets.finish()


def _plan_read(
    target: Target,
    file: FileReads,
    info: FileTensor,
    cast: bool,
    problems: list[str],
) -> None:
    misfits = target.misfits(
        info.shape,
        None if cast else info.dtype,
        file.name,
        remedy=": pass cast=True to convert it",
    )
    problems += misfits
    if not misfits and target.begin < target.end:
        saved = dtype_named(info.dtype)
        first = info.begin + target.begin * saved.itemsize
        last = info.begin + target.end * saved.itemsize
        file.reads.append(Read(target.what, first, last, saved, target.tensor))


def _aliases(file: FileReads, problems: list[str]) -> dict[str, str]:
    """Return the other names of tensors in a file that export wrote."""
    text = file.metadata.get(ALIASES)
    if text is None:
        return {}
    try:
        aliases: dict[str, Any] = _documents.parse_json(text.encode())
        return {alias: string(name, alias) for alias, name in aliases.items()}
    except ValueError as error:
        problems.append(f"{file.name}: its aliases are damaged: {error}")
        return {}
