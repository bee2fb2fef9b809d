"""The command line: python -m fsdp_c trace summary|merge|show FOLDER."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp_c._text import folder_commands
from fsdp_c.tools.trace._clocks import align, describe
from fsdp_c.tools.trace._data import TraceError
from fsdp_c.tools.trace._traces import Trace, load


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_c trace",
        description="Read the timelines that fsdp_c.trace recorded.",
    )
    add = folder_commands(parser, "FOLDER", "folder with rank0.json, rank1.json, ...")
    summary = add(
        "summary", _summary, "print where the time of a step went, with advice"
    )
    summary.add_argument("--rank", type=int, help="one rank only (default: all)")
    merge = add("merge", _merge, "merge all ranks into one file for ui.perfetto.dev")
    merge.add_argument("--output", help="output file (default: FOLDER/trace.json)")
    show = add("show", _show, "draw one step of up to four ranks")
    show.add_argument("--output", help="output file (default: FOLDER/trace.png)")
    show.add_argument("--step", type=int, help="step, from 0 (default: the last)")
    show.add_argument("--rank", type=int, help="one rank only (default: up to 4)")
    return parser


def _load(words: argparse.Namespace) -> Trace:
    trace = load(words.folder)
    rank = getattr(words, "rank", None)
    if rank is None:
        return trace
    chosen = [each for each in trace.recorded if each.rank == rank]
    if not chosen:
        ranks = ", ".join(str(each.rank) for each in trace.recorded)
        raise TraceError(f"{words.folder} holds ranks {ranks}, not {rank}")
    return Trace(chosen)


def _summary(words: argparse.Namespace) -> None:
    print(_load(words).summary(), end="")


def _merge(words: argparse.Namespace) -> None:
    trace = _load(words)
    path = Path(words.output or Path(words.folder) / "trace.json")
    trace.save(path)
    print(f"{path}: {len(trace.recorded)} ranks. {describe(align(trace.lanes))}")


def _show(words: argparse.Namespace) -> None:
    path = Path(words.output or Path(words.folder) / "trace.png")
    _load(words).draw(path, step=words.step)
    print(path)


def main(words: Sequence[str]) -> int:
    """Run the command ``words``; return the exit status.

    0: done. 1: the folder is not as it should be. 2: wrong words.
    """
    parsed = _parser().parse_args(words)
    try:
        parsed.run(parsed)
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
