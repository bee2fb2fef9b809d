"""Messages of the C rooms name faults in their own terms; the bridge adds remedies.

Two APIs stand on the core, and it knows neither: see csrc/core/base/remedy.h.
"""

import re
from pathlib import Path

import pytest

from helpers.rooms import CSRC

ROOMS = ("core", "host", "shm", "nccl", "cuda")
FILES = [
    path
    for room in ROOMS
    for path in sorted((CSRC / room).rglob("*"))
    if path.suffix in {".c", ".h", ".cu", ".hpp"}
]
# Names of the Python API, of the command line and of the environment.
NAMES = re.compile(
    r"""\b(fsdp_c\.|FSDP_C_|TORCH_|torch\.|python\b|doctor\b|fully_shard\b|FSDPModule
    |requires_grad|no_sync|summon_full_params|capture_step|offload_activations
    |fsdp_(pre|post)_all_gather|state_dict|zero_grad|register_\w+|set_\w+|\w+\(\))""",
    re.VERBOSE,
)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
PIECE = re.compile(r'"((?:\\.|[^"\\\n])*)"')
# One string with what stands between its pieces: PRId64, for example.
TEXT = re.compile(rf"{PIECE.pattern}(?:\s*(?:PRI\w+\s*)?{PIECE.pattern})*")
REMEDY = re.compile(r"\bFSDP_REMEDY_\w+")
REMEDIES = CSRC / "core/base/remedy.h"


def texts_of(code: str) -> list[str]:
    """Return the strings of C code, each in one piece."""
    texts = TEXT.finditer(COMMENT.sub(" ", code))
    return ["".join(PIECE.findall(text.group())) for text in texts]


def test_texts_are_found() -> None:
    code = r'f("unit %" PRId64 /* "no" */ " has"' + '\n  " \\"it\\"", 1, "b");'
    assert texts_of(code) == [r"unit % has \"it\"", "b"]
    for text in ("call fsdp_c.reset", "set requires_grad", "call unshard() first"):
        assert NAMES.search(text), text
    for text in ("the unshard of unit", "fsdp_c_shm", "gradients are reset"):
        assert not NAMES.search(text), text


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(CSRC)))
def test_messages_name_no_function_of_the_user(path: Path) -> None:
    named = [text for text in texts_of(path.read_text()) if NAMES.search(text)]
    assert named == [], "give the failure a remedy (core/base/remedy.h)"


def test_remedies_are_used() -> None:
    """Each by a room below; that each has a sentence, the compiler checks."""
    listed = set(REMEDY.findall(REMEDIES.read_text())) - {"FSDP_REMEDY_NONE"}
    used = {
        remedy
        for path in FILES
        if path != REMEDIES
        for remedy in REMEDY.findall(path.read_text())
    }
    assert listed - used == set()
