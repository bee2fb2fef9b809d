"""The words of the glossary, plain ASCII, and files of a readable length."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 650

C_FILES = [
    path
    for folder in ("csrc", "tests/c")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".c", ".h", ".cpp", ".hpp", ".cu"}
]
PY_FILES = [
    ROOT / "setup.py",
    *(
        path
        for folder in ("fsdp_c", "tests", "benchmarks", "examples")
        for path in sorted((ROOT / folder).rglob("*.py*"))
        if path.suffix in {".py", ".pyi"} and path != Path(__file__).resolve()
    ),
]
# Where the words hold; tests and benchmarks also speak of torch's own names.
OUR_FILES = [p for p in (*C_FILES, *PY_FILES) if p.is_relative_to(ROOT / "csrc")]
OUR_FILES += [p for p in PY_FILES if p.is_relative_to(ROOT / "fsdp_c")]

# A banned part of an identifier (between underscores): the word to use.
BANNED = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "bwd": "backward",
    "cnt": "num_x",
    "fwd": "forward",
    "lookahead": "prefetch",
    "nranks": "world_size",
    "pg": "shard_group, replica_group or process_group",
    "reducescatter": "reduce_scatter",
    "rs": "reduce_scatter",
}
BANNED_WHOLE = {
    "dp_size": "world_size",
    "end_idx": "end, half-open",
    "numel_padded": "padded_numel",
}
# What users of FSDP1 read under this name.
TORCHS_OWN = {"_inter_node_pg", "_fwd_bwd_param_dtype"}
# An identifier of ours: not a member or a name of someone else's namespace.
IDENTIFIER = re.compile(r"(?<![\w.:>])[A-Za-z_]\w*")
NOISE = re.compile(
    r'/\*.*?\*/|//[^\n]*|\#[^\n]*|"""(?:.|\n)*?"""|"(?:\\.|[^"\\\n])*"|'
    r"'(?:\\.|[^'\\\n])*'",
    re.DOTALL,
)


def identifiers(path: Path) -> set[str]:
    """Return our identifiers of a file, outside comments, strings and imports."""
    code = NOISE.sub(" ", path.read_text())
    lines = [
        line
        for line in code.splitlines()
        if not line.lstrip().startswith(("import ", "from "))
    ]
    return set(IDENTIFIER.findall("\n".join(lines)))


def complaint(name: str) -> str | None:
    """Return what to write instead of the identifier ``name``."""
    lower = name.lower()
    if lower in BANNED_WHOLE:
        return BANNED_WHOLE[lower]
    if re.fullmatch(r"n_[a-z]\w*", lower):
        return "num_x"
    if re.fullmatch(r"fsdp_\w+_t", name):
        return "no _t: POSIX owns it"
    if name.startswith("fsdp__"):
        return "fsdp_<noun>_priv_<verb>"
    return next((BANNED[part] for part in lower.split("_") if part in BANNED), None)


@pytest.mark.parametrize("name", ["numel_padded", "n_params", "unit_cnt", "fsdp_a_t"])
def test_banned_words_are_seen(name: str) -> None:
    assert complaint(name) is not None


def test_words() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name} (use: {better})"
        for path in OUR_FILES
        for name in sorted(identifiers(path) - TORCHS_OWN)
        if (better := complaint(name)) is not None
    ]
    assert not wrong, "\n".join(wrong)


def test_plain_ascii() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (*C_FILES, *PY_FILES)
        for number, line in enumerate(path.read_text("utf-8").split("\n"), 1)
        if not line.isascii()
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_is_too_long() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines())
        for path in (*C_FILES, *PY_FILES)
    }
    too_long = {name: num for name, num in lengths.items() if num > MAX_LINES}
    assert not too_long, f"over {MAX_LINES} lines, usually two concepts: {too_long}"


def test_ends_of_comments_have_company() -> None:
    """A comment a little too long for its line leaves its end alone on the next."""
    alone = re.compile(r"/\*.*\S.*\n\s*\*/")
    wrong = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}"
        for path in C_FILES
        for text in [path.read_text("utf-8")]
        for found in alone.finditer(text)
        if "*/" not in found.group().split("\n")[0]
    ]
    assert not wrong, "\n".join(wrong)
