"""Each ``Note [Title]`` that a file refers to is written down exactly once.

A note's title stands alone on its line, behind the comment's marker; every other
mention is a reference.
"""

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "fsdp_c", "tests", "benchmarks", "examples", "docs")
SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".cu", ".py", ".pyi", ".md"}

MARKER = r"(?:/\*+|\*|//+|#+)?"
MENTION = re.compile(rf"Note\s+{MARKER}\s*\[(\w[^\]]*)\]")
DEFINITION = re.compile(rf"^\s*{MARKER}\s*Note \[(\w[^\]]*)\]$", re.MULTILINE)


def titles(pattern: re.Pattern[str]) -> dict[str, list[str]]:
    """Return the files, once per match, of each title that ``pattern`` finds."""
    found = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path != Path(__file__).resolve():
                for title in pattern.findall(path.read_text()):
                    # A reference may be broken over two lines of a comment.
                    joined = re.sub(rf"\s*\n\s*{MARKER}\s*", " ", title)
                    found[joined].append(str(path.relative_to(ROOT)))
    return found


def test_references_resolve() -> None:
    defined = titles(DEFINITION)
    missing = {t: paths for t, paths in titles(MENTION).items() if t not in defined}
    assert not missing


def test_notes_are_defined_once() -> None:
    assert not {t: paths for t, paths in titles(DEFINITION).items() if len(paths) > 1}
