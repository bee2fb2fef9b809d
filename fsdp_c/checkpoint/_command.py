"""The command line: python -m fsdp_c checkpoint info|verify|export PATH."""

import argparse
import sys
from collections.abc import Sequence

from fsdp_c._text import folder_commands
from fsdp_c.checkpoint._dtypes import DTYPES
from fsdp_c.checkpoint._errors import CheckpointError
from fsdp_c.checkpoint._export import export
from fsdp_c.checkpoint._verify import info, verify

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in DTYPES.values()
    if dtype.is_floating_point
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_c checkpoint",
        description="Inspect and convert checkpoints.",
    )
    add = folder_commands(parser, "PATH", "checkpoint folder")
    add("info", _info, "print what the manifest lists")
    add("verify", _verify, "read all files and verify their checksums")
    to_files = add("export", _export, "write the model as model*.safetensors")
    to_files.add_argument("target", metavar="TARGET", help="output folder")
    to_files.add_argument(
        "--max-shard-size",
        default="5GB",
        help="largest file (default: %(default)s)",
    )
    to_files.add_argument(
        "--dtype", choices=sorted(_DTYPES), help="convert floating-point tensors"
    )
    to_files.add_argument(
        "--overwrite", action="store_true", help="replace TARGET if it exists"
    )
    return parser


def _info(words: argparse.Namespace) -> None:
    print(info(words.path))


def _verify(words: argparse.Namespace) -> None:
    found = verify(words.path)
    manifest = found.manifest
    print(
        f"{found.path}: intact, {manifest.nbytes:,} bytes of {manifest.world_size} "
        f"rank{'s' if manifest.world_size > 1 else ''}"
    )


def _export(words: argparse.Namespace) -> None:
    for name in export(
        words.path,
        words.target,
        max_shard_size=words.max_shard_size,
        dtype=_DTYPES.get(words.dtype),
        overwrite=words.overwrite,
    ):
        print(name)


def main(words: Sequence[str]) -> int:
    """Run the command ``words``; return the exit status.

    0: done. 1: the checkpoint is damaged, the target cannot be written, or a value is
    not possible. 2: the command line cannot be parsed.
    """
    parsed = _parser().parse_args(words)
    try:
        parsed.run(parsed)
    except (CheckpointError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
